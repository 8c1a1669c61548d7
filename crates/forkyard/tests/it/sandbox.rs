use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Stdio;

use super::sandbox_ends::is_full;
use super::{World, until};

#[test]
fn a_command_runs_in_a_sandbox_that_is_gone_afterwards() {
    let w = World::new();
    let ran =
        w.run(&["sandbox", "run", "--network", "none", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (7, "out\n", "err\n"));
    let json = w.json(&["--json", "sandbox", "run", "--network", "none", "--", "echo", "hi"]);
    assert_eq!((json["exit_code"].as_i64(), json["stdout"].as_str()), (Some(0), Some("hi\n")));
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

#[test]
fn a_docker_engine_that_hangs_holds_nobody_up() {
    let w = World::new();
    let socket = w.dir.path().join("docker.sock");
    let engine = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let host = format!("unix://{}", socket.display());
    let env = [("DOCKER_HOST", host.as_str())];
    let ran = w.run_with(&["sandbox", "run", "--network", "none", "--", "true"], &env);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    engine.set_nonblocking(true).unwrap();
    let asked = engine.accept().map(drop).map_err(|e| e.kind());
    assert_eq!(asked, Err(std::io::ErrorKind::WouldBlock), "a local sandbox is none of its business");

    let ran = w.run_with(&["list"], &env);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = w.run_with(&["sandbox", "list"], &env);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "There is no sandbox.\n"));
    assert!(ran.stderr.contains("Docker's sandboxes are left out"), "{}", ran.stderr);
    let ran = w.run_with(&["sandbox", "cat", "box", "/a"], &env);
    assert!(ran.stderr.contains("no sandbox box") && ran.stderr.contains("left out"), "{}", ran.stderr);
    let ran = w.run_with(&["sandbox", "run", "--provider", "docker", "--", "true"], &env);
    assert_ne!(ran.code, 0);
    assert!(ran.stderr.contains("did not answer in time"), "{}", ran.stderr);
}

#[test]
fn nothing_of_a_sandbox_is_left_when_its_command_ends() {
    let w = World::new();
    for _ in 0..5 {
        assert_eq!(w.run(&["sandbox", "run", "--network", "none", "--", "touch", "a", "b", "c"]).code, 0);
        let left = |folder| -> Vec<_> {
            let there = std::fs::read_dir(w.home().join("sandboxes").join(folder)).unwrap();
            there.map(|entry| entry.unwrap().file_name()).collect()
        };
        assert!(left("sandboxes").is_empty(), "{:?}", left("sandboxes"));
        // Its files go without the command.
        until("its files are gone", || left("trash").is_empty());
    }
}

#[test]
fn a_sandbox_lives_on_from_command_to_command() {
    lives_on(&World::new(), &[], &[]);
}

/// From its creation to its end, by every provider. `provider`: which one; `image`: what it starts from.
pub fn lives_on(w: &World, provider: &[&str], image: &[&str]) {
    let create = ["sandbox", "create", "--network", "none", "--name", "box1", "--memory", "256MiB"];
    let ran = w.run(&[&create[..], provider, image].concat());
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "box1\n"), "{}", ran.stderr);
    w.write(&w.repo().join("in.txt"), "from outside\n");
    assert_eq!(w.run(&["sandbox", "cp", "in.txt", "box1:/workspace/"]).code, 0);
    assert_eq!(w.run(&["sandbox", "cat", "box1", "/workspace/in.txt"]).stdout, "from outside\n");
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", "echo more >> in.txt"]).code, 0);
    // A hole stays one: what is nothing inside takes no room here.
    let sparse = "truncate -s 64M holes; echo end >> holes; truncate -s 80M holes";
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", sparse]).code, 0);
    assert_eq!(w.run(&["sandbox", "cp", "box1:holes", "holes"]).code, 0);
    let holes = std::fs::read(w.repo().join("holes")).unwrap();
    assert!(holes.len() == 80 << 20 && holes[64 << 20..].starts_with(b"end\n\0"), "{} bytes", holes.len());
    let taken = std::os::unix::fs::MetadataExt::blocks(&w.repo().join("holes").metadata().unwrap()) * 512;
    assert!(taken < 8 << 20, "{taken} bytes of the disk");
    assert_eq!(w.run(&["sandbox", "cp", "box1:/workspace/in.txt", "out.txt"]).code, 0);
    assert_eq!(std::fs::read_to_string(w.repo().join("out.txt")).unwrap(), "from outside\nmore\n");
    assert!(w.run(&["sandbox", "ls", "box1"]).stdout.contains("in.txt"));
    assert_eq!(w.json(&["--json", "sandbox", "stats", "box1"])["limits"]["memory_bytes"], 256 << 20);
    assert!(w.run(&["sandbox", "health", "box1"]).stdout.starts_with("box1 is well"));

    // A child has the files, and a life of its own.
    let ran = w.run(&["sandbox", "fork", "box1"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let child = ran.stdout.trim().to_string();
    assert_eq!(w.run(&["sandbox", "exec", &child, "--", "rm", "in.txt"]).code, 0);
    assert_eq!(w.run(&["sandbox", "cat", "box1", "in.txt"]).code, 0);

    let ran = w.run(&["sandbox", "snapshot", "box1", "--name", "snap1"]);
    assert!(ran.code == 0 && ran.stdout.starts_with("snap1"), "{}{}", ran.stdout, ran.stderr);
    let from = ["sandbox", "run", "--network", "none", "--snapshot", "snap1"];
    let ran = w.run(&[&from[..], provider, &["--", "cat", "in.txt"]].concat());
    assert_eq!(ran.stdout, "from outside\nmore\n", "{}", ran.stderr);
    for (command, status) in
        [("pause", "paused"), ("resume", "running"), ("stop", "stopped"), ("start", "running")]
    {
        let ran = w.run(&["sandbox", command, "box1"]);
        assert_eq!(ran.code, 0, "{command}: {}", ran.stderr);
        let list = w.json(&["--json", "sandbox", "list"]);
        let found = list["sandboxes"].as_array().unwrap().iter().find(|s| s["id"] == "box1").unwrap().clone();
        assert_eq!(found["status"], status, "after {command}");
        let steers = [&["pause", "box1"][..], &["resume", "box1"], &["fork", "box1"], &["health", "box1"]];
        for steer in steers.into_iter().filter(|_| status == "stopped") {
            let ran = w.run(&[&["sandbox"][..], steer].concat());
            let hint = "hint: start it with: forkyard sandbox start box1";
            assert_eq!((ran.code, ran.stderr.lines().last()), (1, Some(hint)), "{steer:?}");
        }
    }
    // What is to be made of something that is not there.
    for from in [["--snapshot", "nobody"], ["--image", "oci:/nowhere"], ["--volume", "/nowhere:/x"]] {
        let ran = w.run(&[&["sandbox", "run", "--network", "none"][..], &from, &["true"]].concat());
        assert!(ran.code == 2 && ran.stderr.contains("\nhint: "), "{from:?}: {}", ran.stderr);
    }
    assert_eq!(w.run(&["sandbox", "cat", "box1", "in.txt"]).stdout, "from outside\nmore\n");
    assert_eq!(w.run(&["sandbox", "rm", "box1", &child]).code, 0);
    let ran = w.run(&["sandbox", "exec", "box1", "--", "true"]);
    assert_eq!((ran.code, ran.stderr.lines().next()), (2, Some("error: there is no sandbox box1")));
    let ran = w.run(&["sandbox", "cp", "a", "b"]);
    assert!(ran.stderr.contains("SANDBOX:PATH"), "{}", ran.stderr);
}

#[test]
fn a_shell_wants_a_terminal() {
    let w = World::new();
    let ran = w.run(&["sandbox", "shell", "box1"]);
    assert_eq!((ran.code, ran.stderr.lines().next()), (2, Some("error: a shell needs a terminal")));
}

#[test]
fn what_can_not_be_copied_out_leaves_the_file_that_is_there() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    let script = "echo new > file; head -c 3000000 /dev/zero > large; : > empty";
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", script]).code, 0);
    let file = |name: &str| w.repo().join(name);
    let text = |name: &str| std::fs::read_to_string(file(name)).unwrap();
    let cp = |from: &str, to: &str| w.run(&["sandbox", "cp", &format!("box1:{from}"), to]);
    w.write(&file("there"), "old\n");
    std::fs::set_permissions(file("there"), PermissionsExt::from_mode(0o640)).unwrap();
    let names = || std::fs::read_dir(w.repo()).unwrap().count();
    let before = names();
    assert_ne!(cp("nowhere", "there").code, 0);
    assert_ne!(cp("nowhere", "not-there").code, 0);
    assert_eq!((text("there").as_str(), names()), ("old\n", before));
    let ran = cp("file", "nowhere/file");
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.starts_with("error: nowhere/file: No such file or directory"), "{}", ran.stderr);
    assert!(ran.stderr.contains("\nhint: ") && !ran.stderr.contains(".forkyard."), "{}", ran.stderr);

    assert_eq!(cp("file", "there").code, 0);
    let mode = |name: &str| file(name).metadata().unwrap().mode() & 0o777;
    assert_eq!((text("there").as_str(), mode("there")), ("new\n", 0o640));
    w.write(&file("usual"), "");
    assert_eq!(cp("large", "new").code, 0);
    assert_eq!((file("new").metadata().unwrap().len(), mode("new")), (3_000_000, mode("usual")));
    assert_eq!(cp("empty", "new").code, 0);
    assert_eq!(text("new"), "");
    // A link leads to the file that is meant; what is no file stays what it is.
    std::os::unix::fs::symlink("there", file("link")).unwrap();
    std::fs::hard_link(file("usual"), file("other")).unwrap();
    assert_eq!((cp("empty", "link").code, cp("file", "usual").code), (0, 0));
    assert!(file("link").is_symlink());
    assert_eq!((text("there").as_str(), text("other").as_str()), ("", "new\n"));
    assert!(cp("file", "/dev/stdout").stdout.starts_with("new\n"));
    assert_eq!(cp("file", "/dev/null").code, 0);
    assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
    assert_eq!(names(), before + 4);
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
}

#[test]
fn stats_say_what_is_used_of_the_processor() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    let busy = "while :; do :; done >/dev/null 2>&1 & echo started";
    assert_eq!(w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", busy]).code, 0);
    let json = w.json(&["--json", "sandbox", "stats", "box1"]);
    assert!(json["stats"]["cpu_percent"].as_f64().unwrap() > 5.0, "{json}");
    let shown = w.run(&["sandbox", "stats", "box1"]).stdout;
    let cpu = shown.lines().find(|line| line.starts_with("cpu")).unwrap();
    assert!(!cpu.contains(" 0% of"), "{shown}");
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
}

#[test]
fn an_interrupt_reaches_a_command_whose_output_nobody_takes() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    // Its shell writes nothing, so that it can say at once that it was interrupted.
    let flood = "trap ': > got; kill $!; exit 42' INT; yes flood & wait";
    let mut child = w
        .program(&["sandbox", "exec", "box1", "--", "sh", "-c", flood])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    until("the output waits for a reader", || is_full(&out));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    until("the interrupt arrives", || {
        w.run(&["sandbox", "exec", "box1", "--", "test", "-e", "got"]).code == 0
    });
    assert!(is_full(&out) && child.try_wait().unwrap().is_none(), "what it wrote is still to be read");
    let reader = std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    until("the command ends", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(42));
    drop(reader.join());
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
}
