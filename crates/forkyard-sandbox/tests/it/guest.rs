//! The guest by its protocol alone, as pid 1 of a pid namespace: several owners at once, who read slowly, leave early and ask for
//! what others have.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forkyard_guest::protocol::{
    Answer, ExecOp, ExitInfo, Fault, MAX_FRAME_TO_HOST, Op, PREFIX, Reply, Request, VERSION, decode_prefix,
    encode,
};
use forkyard_sandbox::local::GUEST;

/// Far more than anything here takes.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

struct Guest {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Guest {
    fn start() -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("guest");
        std::fs::write(&program, GUEST).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let config = serde_json::json!({
            "token": "t", "lifetime_ms": 600_000, "attempt": 1, "env": { "PATH": "/usr/bin:/bin" },
        });
        let child = Command::new("unshare")
            .args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(&program)
            .arg("serve")
            .arg(dir.path().join("socket"))
            .env("FORKYARD_GUEST", config.to_string())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Guest { child, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Of nobody yet.
    fn stranger(&self) -> Owner {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(self.path("socket")) {
                Ok(stream) => break stream,
                Err(e) => assert!(begun.elapsed() < ANSWER_WITHIN, "the guest does not listen: {e}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(ANSWER_WITHIN)).unwrap();
        Owner { stream, seq: 0 }
    }

    fn owner(&self) -> Owner {
        let mut owner = self.stranger();
        let hello = owner.tell(Op::Hello { version: VERSION, attempt: 1, token: Some("t".into()) });
        assert_eq!(owner.answer(hello), Answer::Welcome { version: VERSION });
        owner
    }

    fn pid(&self) -> u32 {
        children(self.child.id())[0]
    }

    /// Processor time of the guest itself, in hundredths of a second.
    fn ticks(&self) -> u64 {
        let fields = stat(self.pid());
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Whether each of the guest's children, of which there is one at least, is stopped.
    fn is_stopped(&self) -> bool {
        let commands = children(self.pid());
        assert!(!commands.is_empty());
        commands.iter().all(|pid| stat(*pid)[0] == "T")
    }
}

fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// What follows the name.
fn stat(pid: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    text.rsplit_once(')').unwrap().1.split_whitespace().map(String::from).collect()
}

fn soon(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < ANSWER_WITHIN, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Owner {
    stream: UnixStream,
    seq: u32,
}

impl Owner {
    fn tell(&mut self, op: Op) -> u32 {
        self.tell_with(op, &[])
    }

    fn tell_with(&mut self, op: Op, body: &[u8]) -> u32 {
        self.seq += 1;
        self.stream.write_all(&encode(&Request { seq: self.seq, op }, body)).unwrap();
        self.seq
    }

    fn next(&mut self) -> (u32, Answer, usize) {
        let mut prefix = [0; PREFIX];
        self.stream.read_exact(&mut prefix).unwrap();
        let (length, head) = decode_prefix(prefix, MAX_FRAME_TO_HOST).unwrap();
        let mut frame = vec![0; length];
        self.stream.read_exact(&mut frame).unwrap();
        let reply: Reply = serde_json::from_slice(&frame[..head]).unwrap();
        (reply.seq, reply.answer, length - head)
    }

    /// The next one, which is to be of this request.
    fn answer(&mut self, seq: u32) -> Answer {
        let (of, answer, _) = self.next();
        assert_eq!(of, seq, "{answer:?}");
        answer
    }

    fn ask(&mut self, op: Op) -> Answer {
        let seq = self.tell(op);
        self.answer(seq)
    }

    fn done(&mut self, op: Op) {
        assert_eq!(self.ask(op), Answer::Done);
    }

    fn quiet(&mut self) {
        let answer = self.ask(Op::Quiesce);
        assert!(matches!(answer, Answer::Quiet { .. }), "{answer:?}");
    }

    fn start(&mut self, op: ExecOp) -> u32 {
        let exec = self.tell(Op::Exec(op));
        assert_eq!(self.answer(exec), Answer::Started { resumed: false });
        exec
    }

    fn exit(&mut self, exec: u32) -> ExitInfo {
        match self.answer(exec) {
            Answer::Exit(exit) => exit,
            other => panic!("{other:?}"),
        }
    }
}

fn sh(script: &str) -> ExecOp {
    ExecOp {
        argv: vec!["sh".into(), "-c".into(), script.into()],
        cwd: Some("/".into()),
        max_output: u64::MAX,
        ..ExecOp::default()
    }
}

fn write(path: &Path) -> Op {
    Op::Write { path: path.to_str().unwrap().into(), mode: None }
}

#[test]
fn what_a_slow_reader_has_not_taken_is_not_lost() {
    let guest = Guest::start();
    let mut owner = guest.owner();
    let count = guest.path("count");
    // Each piece is written whole or not at all, and counted only then. It is killed when nothing takes them any more.
    let script = format!("while head -c 1024 /dev/zero; do echo >> {}; done", count.display());
    let exec = owner.start(ExecOp { timeout_ms: Some(4_000), ..sh(&script) });
    let mut other = guest.owner();
    soon("the command is not killed", || {
        matches!(other.ask(Op::Stats), Answer::Stats { processes: 0, .. }) && count.exists()
    });
    // Until the guest no longer waits for the end of the output.
    std::thread::sleep(Duration::from_millis(300));
    let before = guest.ticks();
    std::thread::sleep(Duration::from_millis(500));
    assert!(guest.ticks() - before < 8, "the guest is busy with nothing");
    let mut taken = 0;
    let exit = loop {
        match owner.next() {
            (of, Answer::Output { stderr: false }, length) if of == exec => {
                taken += length as u64;
                owner.tell(Op::Ack { exec, frames: 1 });
            }
            (_, Answer::Exit(exit), _) => break exit,
            other => panic!("{other:?}"),
        }
    };
    let written = std::fs::metadata(&count).unwrap().len() * 1024;
    assert!(taken > 300 << 10, "{taken} bytes do not fill what is between them");
    assert!(taken >= written, "{written} bytes were written, {taken} arrived");
    assert_eq!((exit.exit_code, exit.stdout_bytes, exit.truncated), (124, taken, false));
}

#[test]
fn a_terminal_that_is_closed_keeps_nobody_busy() {
    let guest = Guest::start();
    let mut owner = guest.owner();
    let script = "exec sleep 60 < /dev/null > /dev/null 2>&1";
    owner.start(ExecOp { pty: Some((80, 24)), stdin: true, ..sh(script) });
    let command = children(guest.pid())[0];
    let asleep =
        || std::fs::read_to_string(format!("/proc/{command}/comm")).is_ok_and(|name| name == "sleep\n");
    soon("it does not sleep", asleep);
    let before = guest.ticks();
    std::thread::sleep(Duration::from_millis(500));
    assert!(guest.ticks() - before < 8, "the guest is busy with nothing");
}

#[test]
fn the_quiet_ends_with_whoever_asked_for_it() {
    let guest = Guest::start();
    let (mut one, mut two) = (guest.owner(), guest.owner());
    one.quiet();
    let refused = two.ask(Op::Quiesce);
    assert!(matches!(refused, Answer::Error { kind: Fault::Unavailable, .. }), "{refused:?}");
    two.done(Op::Thaw);
    let exec = two.tell(Op::Exec(sh("exit 3")));
    // In order: had it been started, its word would come first.
    assert_eq!(two.ask(Op::Calls), Answer::Calls { calls: vec![] });
    one.done(Op::Thaw);
    assert_eq!(two.answer(exec), Answer::Started { resumed: false });
    assert_eq!(two.exit(exec).exit_code, 3);
}

#[test]
fn a_pause_and_a_snapshot_know_of_each_other() {
    let guest = Guest::start();
    let (mut snapshot, mut user) = (guest.owner(), guest.owner());
    // One process alone: who waits for a child that was stopped before it was itself is not stopped, but stands still, too.
    user.start(sh("while :; do :; done"));
    snapshot.quiet();
    snapshot.done(Op::Pause);
    soon("commands do not stand still", || guest.is_stopped());
    user.done(Op::Resume);
    assert!(guest.is_stopped(), "a resume let commands write into a snapshot");
    user.done(Op::Pause);
    snapshot.done(Op::Resume);
    assert!(guest.is_stopped(), "the end of a snapshot undid a pause");
    snapshot.done(Op::Thaw);
    assert!(guest.is_stopped(), "the end of a snapshot undid a pause");
    user.done(Op::Resume);
    soon("commands do not go on", || !guest.is_stopped());
}

#[test]
fn quiet_comes_when_the_last_writer_has_left() {
    let guest = Guest::start();
    let (mut snapshot, mut writer) = (guest.owner(), guest.owner());
    let path = guest.path("file").to_str().unwrap().to_string();
    writer.done(Op::WriteBegin { path, mode: None });
    let quiesce = snapshot.tell(Op::Quiesce);
    // It is heard, and not answered.
    assert_eq!(snapshot.ask(Op::Calls), Answer::Calls { calls: vec![] });
    drop(writer);
    let answer = snapshot.answer(quiesce);
    assert!(matches!(answer, Answer::Quiet { busy: false, .. }), "{answer:?}");
}

#[test]
fn a_write_that_waited_for_a_thread_waits_for_a_snapshot_too() {
    let guest = Guest::start();
    let large = guest.path("large");
    std::fs::File::create(&large).unwrap().set_len(64 << 20).unwrap();
    let (mut busy, mut writer, mut snapshot) = (guest.owner(), guest.owner(), guest.owner());
    // Nobody takes what they read: each of the guest's threads waits.
    for _ in 0..32 {
        busy.tell(Op::Read { path: large.to_str().unwrap().into(), offset: 0, max: u64::MAX });
    }
    soon("the threads are not busy", || {
        std::fs::read_dir(format!("/proc/{}/task", guest.pid())).unwrap().count() == 33
    });
    let file = guest.path("file");
    let written = writer.tell_with(write(&file), b"x");
    assert_eq!(writer.ask(Op::Calls), Answer::Calls { calls: vec![] });
    snapshot.quiet();
    drop(busy);
    // It came after the write, and needs a thread.
    let stat = snapshot.ask(Op::Stat { path: large.to_str().unwrap().into() });
    assert!(matches!(stat, Answer::Stat { .. }), "{stat:?}");
    assert!(!file.exists(), "a file was written into a snapshot");
    snapshot.done(Op::Thaw);
    assert_eq!(writer.answer(written), Answer::Done);
    assert!(file.exists());
}

#[test]
fn what_was_taken_back_while_it_waited_does_not_begin() {
    let guest = Guest::start();
    let (mut snapshot, mut owner) = (guest.owner(), guest.owner());
    snapshot.quiet();
    let file = guest.path("file");
    let touch = sh(&format!("touch {}", file.display()));
    let dropped = owner.tell(Op::Exec(touch.clone()));
    owner.tell(Op::Drop { exec: dropped });
    let forgotten = owner.tell(Op::Exec(ExecOp { call: Some("c".into()), ..touch }));
    let forget = owner.tell(Op::Forget { call: "c".into() });
    let answer = owner.answer(forgotten);
    assert!(matches!(answer, Answer::Error { kind: Fault::NotFound, .. }), "{answer:?}");
    assert_eq!(owner.answer(forget), Answer::Done);
    let begin = owner.tell(Op::WriteBegin { path: file.to_str().unwrap().into(), mode: None });
    owner.done(Op::Abort { write: begin });
    snapshot.done(Op::Thaw);
    let last = owner.start(sh("exit 0"));
    assert_eq!(owner.exit(last).exit_code, 0);
    assert!(!file.exists());
}

#[test]
fn strangers_keep_no_owner_out() {
    let guest = Guest::start();
    let mut silent: Vec<Owner> = (0..100).map(|_| guest.stranger()).collect();
    let mut owner = guest.owner();
    assert_eq!(owner.ask(Op::Calls), Answer::Calls { calls: vec![] });
    // The last one is still there, says what it may not, and is sent away.
    let last = silent.last_mut().unwrap();
    let refused = last.ask(Op::Stats);
    assert!(matches!(refused, Answer::Error { kind: Fault::Denied, .. }), "{refused:?}");
    assert!(matches!(last.stream.read(&mut [0; 1]), Ok(0)), "a stranger is still heard");
    assert_eq!(owner.ask(Op::Calls), Answer::Calls { calls: vec![] });
}

#[test]
fn strangers_that_never_stop_talking_hold_up_nothing() {
    let guest = Guest::start();
    let mut owner = guest.owner();
    let flood = encode(&Request { seq: 1, op: Op::Stats }, &[]).repeat(10_000);
    let (ended, path) = (AtomicBool::new(false), guest.path("socket"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let Ok(mut stream) = UnixStream::connect(&path) else { continue };
                    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
                    while stream.write_all(&flood).is_ok() {
                        if ended.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                }
            });
        }
        for _ in 0..5 {
            let exec = owner.start(ExecOp { timeout_ms: Some(50), ..sh("sleep 600") });
            assert!(owner.exit(exec).timed_out);
        }
        ended.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_command_that_is_in_no_folder_is_not_found() {
    let guest = Guest::start();
    let mut owner = guest.owner();
    for path in ["", "/etc/passwd", "/nowhere", "/usr/bin:/etc/passwd"] {
        let env = [("PATH".to_string(), path.to_string())].into();
        let op = ExecOp { argv: vec!["nosuchcommand".into()], env, ..sh("") };
        let answer = owner.ask(Op::Exec(op));
        let Answer::Error { kind, message } = answer else { panic!("{path}: {answer:?}") };
        assert_eq!((kind, message.as_str()), (Fault::NotFound, "nosuchcommand: command not found"), "{path}");
    }
}

#[test]
fn whoever_stops_everybody_does_not_stop_the_guest() {
    let guest = Guest::start();
    let (mut owner, mut other) = (guest.owner(), guest.owner());
    let stopper = owner.start(sh("while :; do kill -STOP -1; done"));
    for _ in 0..100 {
        let exec = other.tell(Op::Exec(ExecOp { timeout_ms: Some(50), ..sh("exit 0") }));
        match other.answer(exec) {
            Answer::Started { .. } => drop(other.exit(exec)),
            Answer::Error { kind: Fault::Unavailable, message } => {
                assert!(message.contains("stopped"), "{message}")
            }
            answer => panic!("{answer:?}"),
        }
    }
    owner.tell(Op::Drop { exec: stopper });
    soon("it is not killed", || matches!(other.ask(Op::Stats), Answer::Stats { processes: 0, .. }));
    let exec = other.start(sh("exit 7"));
    assert_eq!(other.exit(exec).exit_code, 7);
}

#[test]
fn nobody_outlives_a_command_by_forking() {
    let guest = Guest::start();
    let mut owner = guest.owner();
    for round in 0..5 {
        let file = guest.path(&format!("hops{round}"));
        let program = guest.path("guest").to_str().unwrap().to_string();
        let argv = vec![program, "probe".into(), "hop".into(), file.to_str().unwrap().into()];
        let exec = owner.start(ExecOp { argv, ..sh("") });
        soon("it does not hop", || file.exists());
        owner.done(Op::Signal { exec, signal: 9 });
        assert_eq!(owner.exit(exec).signal, Some(9));
        soon("somebody is left", || matches!(owner.ask(Op::Stats), Answer::Stats { processes: 0, .. }));
    }
}
