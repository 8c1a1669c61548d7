//! What goes into a command in a sandbox and comes out of it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use super::terminal::Terminal;
use super::{World, until};

const RUN: [&str; 5] = ["sandbox", "run", "--network", "none", "--"];

fn run<'a>(command: &[&'a str]) -> Vec<&'a str> {
    RUN.iter().chain(command).copied().collect()
}

#[test]
fn output_has_no_bound_but_in_a_document() {
    let w = World::new();
    let flood = ["head", "-c", "50000000", "/dev/zero"];
    let ran = w.run(&run(&flood));
    assert_eq!((ran.code, ran.stdout.len(), ran.stderr.as_str()), (0, 50_000_000, ""));

    let args: Vec<&str> = ["--json"].into_iter().chain(run(&flood)).collect();
    let ran = w.run(&args);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((json["truncated"].as_bool(), json["stdout"].as_str().unwrap().len()), (Some(true), 16 << 20));
    assert!(ran.stderr.contains("the output is cut"), "{}", ran.stderr);
}

#[test]
fn standard_input_is_the_commands() {
    let w = World::new();
    let piped = |command: &[&str], bytes: &[u8]| {
        let (mut program, bytes) = (w.program(&run(command)), bytes.to_vec());
        let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || stdin.write_all(&bytes));
        let done = child.wait_with_output().unwrap();
        drop(writer.join().unwrap());
        (done.status.code(), String::from_utf8(done.stdout).unwrap())
    };
    assert_eq!(piped(&["cat"], b"piped\n"), (Some(0), "piped\n".into()));
    // More than the guest lets wait for a command.
    assert_eq!(piped(&["wc", "-c"], &vec![b'x'; 30 << 20]), (Some(0), format!("{}\n", 30 << 20)));
    let slow = "sleep 1; wc -c";
    assert_eq!(piped(&["sh", "-c", slow], &vec![b'x'; 12 << 20]), (Some(0), format!("{}\n", 12 << 20)));

    // A command that has had enough, and input that never ends.
    for endless in ["/dev/zero", "/dev/null"] {
        let stdin = File::open(endless).unwrap();
        let done = w.program(&run(&["head", "-c", "3"])).stdin(stdin).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{endless}");
    }
    let mut open = w.program(&run(&["true"])).stdin(Stdio::piped()).spawn().unwrap();
    let held = open.stdin.take();
    assert_eq!(open.wait().unwrap().code(), Some(0), "somebody holds its input open");
    drop(held);

    // In a sandbox that is there, with variables of the command's own.
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    let mut program =
        w.program(&["sandbox", "exec", "box1", "--env", "A=b c", "--", "sh", "-c", "cat; echo $A"]);
    let input = w.dir.path().join("input");
    std::fs::write(&input, "from a file\n").unwrap();
    let done = program.stdin(File::open(&input).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "from a file\nb c\n");
    let closed = format!("exec {} sandbox exec box1 cat <&-", env!("CARGO_BIN_EXE_forkyard"));
    let done = std::process::Command::new("sh").args(["-c", &closed]).env("FORKYARD_HOME", w.home()).output();
    assert_eq!(done.unwrap().status.code(), Some(0));
}

#[test]
fn a_reader_that_goes_away_ends_the_command_and_its_sandbox() {
    let w = World::new();
    let mut child = w.program(&run(&["yes"])).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "y\n");
    assert_eq!(child.wait().unwrap().code(), Some(141), "as of any program");
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");

    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    let mut child = w.program(&["sandbox", "exec", "box1", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(141));
    let left = || w.json(&["--json", "sandbox", "stats", "box1"])["stats"]["processes"].as_u64();
    until("the command is gone", || left().is_some_and(|n| n <= 1));
}

#[test]
fn on_a_terminal_the_command_has_one() {
    let w = World::new();
    let script = "test -t 0 && test -t 1 && echo it-is; read x; echo got $x; stty size";
    let mut t = Terminal::start(&w, &run(&["sh", "-c", script]), (70, 20));
    t.wait_for("it-is");
    t.press("hello\r");
    t.wait_for("got hello");
    t.wait_for("20 70");

    let script = "test -t 0 || echo it-is-not";
    let t = Terminal::start(
        &w,
        &["sandbox", "run", "-T", "--network", "none", "--", "sh", "-c", script],
        (70, 20),
    );
    t.wait_for("it-is-not");
}

#[test]
fn what_begins_with_a_dash_is_no_command() {
    let w = World::new();
    for args in
        [&["sandbox", "run", "--network-rat", "1MiB", "--", "true"][..], &["sandbox", "exec", "b", "-x"]]
    {
        let ran = w.run(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains("unexpected argument"), "{}", ran.stderr);
    }
    let ran = w.run(&["sandbox", "run", "--network", "none", "ls", "-a", "/workspace"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ".\n..\n"), "{}", ran.stderr);
    let ran = w.run(&["sandbox", "run", "--network", "none", "-t", "0", "true"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("leave it out"), "{}", ran.stderr);
}
