//! Commands: streams, environment, signals, limits of time and output.

use std::time::Duration;

use bytes::Bytes;
use forkyard_core::CallId;

use super::{Case, CaseResult, Ctx, case, ensure, ensure_eq, run, sh};
use crate::{ErrorKind, ExecEvent, ExecRequest, PtySize, Signal};

pub fn cases() -> Vec<Case> {
    vec![
        case!(streams_come_apart),
        case!(arguments_are_not_a_shell),
        case!(env_and_cwd),
        case!(stdin_reaches_it),
        case!(a_timeout_kills_the_tree),
        case!(signals_reach_the_group),
        case!(output_is_bounded),
        case!(a_slow_reader_stops_the_writer),
        case!(large_output_of_a_call_arrives_whole),
        case!(a_background_process_does_not_hold_the_call),
        case!(what_does_not_exist_is_named),
        case!(dropping_ends_a_command_without_id),
        case!(a_terminal, |c| c.pty),
    ]
}

async fn streams_come_apart(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output = sh(&sandbox, "echo a; echo b >&2; printf '\\377\\000'; exit 5").await?;
    ensure_eq!((output.result.exit_code, output.err.as_str()), (5, "b\n"));
    let (result, out, _) = sandbox.exec(ExecRequest::shell("printf 'x\\377\\000y'")).await?.output().await?;
    ensure_eq!(out, b"x\xff\0y".to_vec());
    ensure_eq!((result.stdout_bytes, result.stderr_bytes, result.truncated), (4, 0, false));
    Ok(())
}

async fn arguments_are_not_a_shell(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let odd = ["printf", "%s|", "a b", "$(id)", "'\"", "", "-n", "\n"];
    ensure_eq!(run(&sandbox, ExecRequest::new(odd)).await?.out, "a b|$(id)|'\"||-n|\n|");
    Ok(())
}

async fn env_and_cwd(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.env.insert("FROM_SPEC".into(), "spec".into());
    spec.env.insert("BOTH".into(), "spec".into());
    let sandbox = ctx.sandbox_with(&spec).await?;
    sandbox.make_dir("sub dir").await?;
    let request = ExecRequest::shell("echo $FROM_SPEC $BOTH $FROM_CALL; pwd; echo $HOME $USER")
        .env("BOTH", "call")
        .env("FROM_CALL", "x=y")
        .cwd("sub dir");
    ensure_eq!(run(&sandbox, request).await?.out, "spec call x=y\n/workspace/sub dir\n/home/user user\n");
    Ok(())
}

async fn stdin_reaches_it(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    ensure_eq!(sh(&sandbox, "cat").await?.out, "");
    let request = ExecRequest { stdin: true, ..ExecRequest::new(["wc", "-c"]) };
    let command = sandbox.exec(request).await?;
    let megabyte = Bytes::from(vec![7; 1 << 20]);
    for _ in 0..3 {
        command.control.write_stdin(megabyte.clone()).await?;
    }
    command.control.close_stdin().await?;
    let (_, out, _) = command.output().await?;
    ensure_eq!(String::from_utf8_lossy(&out).trim(), (3 << 20).to_string());
    Ok(())
}

async fn a_timeout_kills_the_tree(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    // A grandchild in a session of its own, whose parent is gone.
    let script = "(setsid sh -c 'while :; do echo alive >> beat; sleep 0.05; done' &) ; echo up; sleep 600";
    let size = async || sandbox.stat("beat").await.map_or(0, |info| info.size);
    let mut before = 0;
    // A slow machine has not come to the grandchild yet when the time is up; it is given more.
    for timeout_ms in [800, 5_000, 20_000] {
        let request = ExecRequest::shell(script).timeout(Duration::from_millis(timeout_ms));
        let output = run(&sandbox, request).await?;
        ensure_eq!((output.result.exit_code, output.result.timed_out), (124, true));
        ensure_eq!(output.out, "up\n");
        before = size().await;
        if before > 0 {
            break;
        }
    }
    ensure!(before > 0, "the grandchild never ran");
    tokio::time::sleep(Duration::from_millis(400)).await;
    ensure_eq!(size().await, before);
    Ok(())
}

async fn signals_reach_the_group(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    for (signal, name) in [(Signal::Term, "TERM"), (Signal::Int, "INT"), (Signal::Hup, "HUP")] {
        let script = format!("trap 'echo got; exit 9' {name}; echo up; while :; do sleep 0.02; done");
        let mut command = sandbox.exec(ExecRequest::shell(script)).await?;
        ensure_eq!(command.events.recv().await.transpose()?, Some(ExecEvent::Stdout("up\n".into())));
        command.control.signal(signal).await?;
        let (result, out, _) = command.output().await?;
        ensure_eq!((name, result.exit_code, out), (name, 9, b"got\n".to_vec()));
    }
    let mut sleeps = sandbox.exec(ExecRequest::shell("echo $$; exec sleep 600")).await?;
    let Some(ExecEvent::Stdout(pid)) = sleeps.events.recv().await.transpose()? else {
        return Err(super::Failed::new("it does not say who it is"));
    };
    let look = format!("cut -d' ' -f3 /proc/{}/stat", String::from_utf8_lossy(&pid).trim());
    for (signal, state) in [(Signal::Stop, "T"), (Signal::Cont, "S")] {
        sleeps.control.signal(signal).await?;
        let limit = tokio::time::Instant::now() + Duration::from_secs(30);
        while sh(&sandbox, &look).await?.out.trim() != state {
            ensure!(tokio::time::Instant::now() < limit, "after {signal:?} it is not {state}");
        }
    }
    sleeps.control.signal(Signal::Kill).await?;
    let (result, ..) = sleeps.output().await?;
    ensure_eq!((result.exit_code, result.signal), (137, Some(9)));
    Ok(())
}

async fn output_is_bounded(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    for call in [None, Some(CallId::new("flood").expect("an id"))] {
        let request = ExecRequest {
            call,
            max_output: Some(100_000),
            ..ExecRequest::shell("head -c 5000000 /dev/zero; head -c 10 /dev/zero >&2")
        };
        let (result, out, err) = sandbox.exec(request).await?.output().await?;
        ensure_eq!((out.len(), err.len()), (100_000, 10));
        ensure_eq!((result.stdout_bytes, result.truncated, result.exit_code), (5_000_000, true, 0));
    }
    Ok(())
}

async fn a_slow_reader_stops_the_writer(ctx: &Ctx) -> CaseResult {
    // Much more than a step of the writer takes, at any speed of the machine.
    const WORK: &str = "i=0; while [ $i -lt 50 ]; do head -c 65536 /dev/zero >/dev/null; i=$((i+1)); done";
    const STILL: u32 = 5;
    let sandbox = ctx.sandbox().await?;
    let request = ExecRequest {
        max_output: Some(u64::MAX),
        ..ExecRequest::shell(
            // In steps of what a pipe alone holds: how much more is on its way depends on how much it writes at once.
            "i=0; while [ $i -lt 1024 ]; do head -c 65536 /dev/zero; i=$((i+1)); echo $i > progress; done",
        )
    };
    let command = sandbox.exec(request).await?;
    let progress = async || -> u64 {
        let text = sandbox.read_file("progress", 0, 100).await.unwrap_or_default();
        String::from_utf8_lossy(&text).trim().parse().unwrap_or(0)
    };
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    let (mut last, mut still) = (0, 0);
    while still < STILL {
        // One look could fall on a writer that is not running just then. One that could go on gets its turns beside this.
        ensure_eq!(sh(&sandbox, WORK).await?.result.exit_code, 0);
        let now = progress().await;
        still = if now > 0 && now == last { still + 1 } else { 0 };
        ensure!(tokio::time::Instant::now() < limit, "the writer neither writes nor stops: {now}");
        last = now;
    }
    ensure!(last < 1024, "all of it was taken from a command whose reader does not read");
    let (result, out, _) = command.output().await?;
    ensure_eq!((out.len(), result.exit_code), (64 << 20, 0));
    Ok(())
}

async fn large_output_of_a_call_arrives_whole(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let call = CallId::new("large").expect("an id");
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i of many; i=$((i+1)); done";
    let want: String = (0..20000).map(|i| format!("line {i} of many\n")).collect();
    for _ in 0..2 {
        let output = run(&sandbox, ExecRequest::shell(script).call(call.clone())).await?;
        ensure!(output.out == want, "{} bytes instead of {}", output.out.len(), want.len());
    }
    Ok(())
}

async fn a_background_process_does_not_hold_the_call(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let command =
        ExecRequest::shell("(while :; do echo noise; echo tick >> beat; sleep 0.02; done) & echo started");
    let output = tokio::time::timeout(Duration::from_secs(20), run(&sandbox, command)).await;
    ensure!(output.is_ok(), "the call waits for a process in the background");
    let size = async || sandbox.stat("beat").await.map_or(0, |info| info.size);
    let before = size().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    ensure!(size().await > before, "the process in the background was killed");
    Ok(())
}

async fn what_does_not_exist_is_named(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let error = async |request| sandbox.exec(request).await.map(drop).err();
    let missing = error(ExecRequest::new(["no-such-program"])).await;
    ensure_eq!(missing.as_ref().map(|e| e.kind), Some(ErrorKind::NotFound));
    ensure!(missing.is_some_and(|e| e.message.contains("no-such-program")), "the program is not named");
    ensure_eq!(
        error(ExecRequest::new(["true"]).cwd("/no/such")).await.map(|e| e.kind),
        Some(ErrorKind::Invalid)
    );
    ensure_eq!(error(ExecRequest::new(Vec::<String>::new())).await.map(|e| e.kind), Some(ErrorKind::Invalid));
    ensure_eq!(error(ExecRequest::new(["a\0b"])).await.map(|e| e.kind), Some(ErrorKind::Invalid));
    ensure_eq!(error(ExecRequest::new(["/etc/passwd"])).await.map(|e| e.kind), Some(ErrorKind::Denied));
    ensure_eq!(
        error(ExecRequest::new(["true"]).env("A=B", "c")).await.map(|e| e.kind),
        Some(ErrorKind::Invalid)
    );
    Ok(())
}

async fn dropping_ends_a_command_without_id(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let mut command =
        sandbox.exec(ExecRequest::shell("echo up; while :; do echo x >> beat; sleep 0.02; done")).await?;
    ensure!(command.events.recv().await.is_some(), "no output");
    drop(command);
    let size = async || sandbox.stat("beat").await.map_or(0, |info| info.size);
    let limit = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let before = size().await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        if size().await == before {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < limit, "it runs on");
    }
}

async fn a_terminal(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let request = ExecRequest {
        pty: Some(PtySize { cols: 91, rows: 33 }),
        ..ExecRequest::shell("test -t 0 && test -t 1 && stty size; read line; echo got $line; stty size")
    };
    let command = sandbox.exec(request).await?;
    command.control.resize(PtySize { cols: 120, rows: 40 }).await?;
    command.control.write_stdin("typed\n".into()).await?;
    let (result, out, err) = command.output().await?;
    let out = String::from_utf8_lossy(&out).into_owned();
    ensure_eq!((result.exit_code, err.len()), (0, 0));
    ensure!(out.contains("got typed") && out.contains("40 120"), "{out:?}");
    Ok(())
}
