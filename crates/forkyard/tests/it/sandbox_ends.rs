//! However `sandbox run` ends, its sandbox ends with it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Child, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::{World, until};

/// A command that does not end by itself.
fn running(w: &World, more: &[&str]) -> Child {
    let args = ["sandbox", "run", "--network", "none"];
    let args: Vec<&str> =
        args.iter().chain(more).chain(&["--", "sh", "-c", "echo up; exec sleep 600"]).copied().collect();
    let mut child = w.program(&args).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    child
}

/// Whether who writes into this pipe has to wait. A writer is asked, which is the kernel's own measure: a full pipe has fewer bytes
/// in it than it is large, since what is written in pieces does not fill its pages.
pub(super) fn is_full(pipe: &impl AsRawFd) -> bool {
    let writer = File::options().write(true).open(format!("/proc/self/fd/{}", pipe.as_raw_fd())).unwrap();
    let mut room = [PollFd::new(&writer, PollFlags::OUT)];
    poll(&mut room, Some(&Timespec::default())).unwrap() == 0
}

fn left(w: &World) -> usize {
    std::fs::read_dir(w.home().join("sandboxes/sandboxes")).unwrap().count()
}

#[test]
fn a_signal_ends_the_command_and_the_sandbox() {
    let w = World::new();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut child = running(&w, &[]);
        assert_eq!(left(&w), 1);
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal:?}");
        assert_eq!(left(&w), 0, "{signal:?}");
    }
    // A command that does not care gets no say in it.
    let deaf = [
        "sandbox",
        "run",
        "--network",
        "none",
        "--",
        "sh",
        "-c",
        "trap '' TERM; echo up; sleep 600; sleep 600",
    ];
    let mut child = w.program(&deaf).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(left(&w), 0);
}

#[test]
fn a_signal_is_heard_while_nobody_reads() {
    let w = World::new();
    let mut child = w
        .program(&["sandbox", "run", "--network", "none", "--", "yes"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let held = child.stdout.take().unwrap();
    until("its output waits for a reader", || is_full(&held));
    assert_eq!(left(&w), 1);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(left(&w), 0);
    drop(held);
}

#[test]
fn a_guest_that_hangs_holds_no_interrupt_up() {
    let w = World::new();
    let mut child = running(&w, &[]);
    let sandboxes = w.home().join("sandboxes/sandboxes");
    let one = std::fs::read_dir(sandboxes).unwrap().next().unwrap().unwrap().path();
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(one.join("meta.json")).unwrap()).unwrap();
    let guest = Pid::from_raw(meta["pid"].as_i64().unwrap() as i32).unwrap();
    kill_process(guest, Signal::STOP).unwrap();
    until("the interrupt is heard", || {
        // The first is the command's, a second one ours.
        child.try_wait().unwrap().is_some() || kill_process(Pid::from_child(&child), Signal::INT).is_err()
    });
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(left(&w), 0);
}

#[test]
fn what_a_killed_run_left_goes_with_the_next_command() {
    let w = World::new();
    for command in [&["sandbox", "list"][..], &["cleanup", "--once"]] {
        let mut child = running(&w, &[]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(left(&w), 1);
        let ran = w.run(command);
        assert_eq!(ran.code, 0, "{command:?}: {}", ran.stderr);
        assert_eq!(left(&w), 0, "{command:?}: {}", ran.stdout);
    }
    // Not one that was to be kept, and not one that somebody is at work with.
    let mut kept = running(&w, &["--keep"]);
    kept.kill().unwrap();
    kept.wait().unwrap();
    let mut other = running(&w, &[]);
    assert_eq!(w.json(&["--json", "sandbox", "list"])["sandboxes"].as_array().unwrap().len(), 2);
    let ran = w.run(&["sandbox", "rm", "--all"]);
    assert_eq!((ran.code, left(&w)), (2, 2), "nobody can be asked: {}", ran.stderr);
    let ran = w.run(&["sandbox", "rm", "--all", "--yes"]);
    assert_eq!((ran.code, left(&w)), (0, 1), "{}", ran.stderr);
    assert!(other.try_wait().unwrap().is_none());
    kill_process(Pid::from_child(&other), Signal::TERM).unwrap();
    other.wait().unwrap();
    assert_eq!(left(&w), 0);
}

#[test]
fn a_commands_way_out_is_its_own_while_others_look() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--name", "box1"]).code, 0);
    let way = w.home().join("egress/box1.lock");
    let hold = ["sandbox", "exec", "box1", "--", "sh", "-c", "echo up; until [ -e go ]; do sleep 0.05; done"];
    let mut first = w.program(&hold).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(first.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&way.metadata().unwrap());
    let before = inode();
    for args in
        [&["ls", "box1"][..], &["exec", "box1", "true"], &["stats", "box1"], &["health"], &["pause", "box1"]]
    {
        let args: Vec<&str> = ["sandbox"].iter().chain(args).copied().collect();
        let ran = w.run(&args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
        assert_eq!(inode(), before, "{args:?} took it over");
    }
    assert_eq!(w.run(&["sandbox", "resume", "box1"]).stdout, "box1 is running again.\n");
    assert_eq!(w.run(&["sandbox", "exec", "box1", "touch", "go"]).code, 0);
    assert_eq!(first.wait().unwrap().code(), Some(0));
    assert!(!way.exists());
}
