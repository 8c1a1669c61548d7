//! Resources: more processes, memory, files and output than allowed, and games against whoever watches.

use std::time::Duration;

use forkyard_core::CallId;

use super::attack;
use super::stage::{PROBE, bring_probe, probe};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run, sh};
use crate::{ErrorKind, ExecRequest, ProviderKind, Signal};

pub fn cases() -> Vec<Case> {
    vec![
        attack!(terminals_and_watchers_are_left, [22],
            "Every terminal of the machine, every inotify instance of the user",
            Harmless by local "max of devpts, bounds of the user namespace" docker nothing),
        attack!(a_fork_bomb_is_contained, [22], "A fork bomb",
            Harmless by local "rlimit of the user namespace" docker "cgroup"),
        attack!(memory_is_contained, [23], "All the memory there is",
            Harmless by local memory "cgroup" else "watchdog" docker "cgroup"),
        attack!(shared_memory_is_contained, [23], "All the memory there is, as files in memory",
            Harmless by local "size of /dev/shm" docker "size of each tmpfs, cgroup"),
        attack!(the_disk_is_contained, [23], "All the disk there is, in folders that can't be listed",
            Harmless by local disk "project quota" else "watchdog" docker "watchdog"),
        attack!(moving_folders_hide_no_flood, [23, 25], "All the disk there is, behind and inside folders that move all the time",
            Harmless by local disk "project quota" else "watchdog, which lets all stand still"
                docker "watchdog, which lets all stand still"),
        attack!(nameless_files_are_contained, [23], "All the disk there is, in a file that has no name any more",
            Harmless by local disk "project quota" else "watchdog: what is open counts"
                docker "watchdog: what is open counts"),
        attack!(hidden_files_are_contained, [23, 25], "All the disk there is, in files without a name that are mapped, on their way through a socket, or held by who has closed itself",
            Harmless by local disk "project quota" else "watchdog: looks into all, and what it can't see holds what is missing"
                docker "watchdog: what it can't see holds what is missing"),
        attack!(inodes_are_contained, [23], "Empty files without end", Harmless by "watchdog: an entry counts 4 KiB"),
        attack!(an_output_flood_is_contained, [23], "Output without end, by many calls at once",
            Harmless by "bounded spool"),
        attack!(logs_are_not_reached, [23], "The logs of the kernel, of the system and of the sandbox's own supervisor",
            Denied by "own /dev and /run, supervisor that can't be looked into"),
        attack!(a_double_fork_dies_with_the_sandbox, [24], "A daemon that outlives its command and its sandbox",
            Harmless by "pid namespace"),
        attack!(hopping_processes_do_not_survive_a_cancel, [24], "Processes that fork faster than anybody looks, and outlive a cancelled command",
            Harmless by "supervisor: kills while nobody can fork"),
        attack!(who_stops_everybody_stops_nobody_else, [25], "Stopping commands before they begin, and the supervisor with them",
            Harmless by "supervisor waits for nobody without end"),
        attack!(a_daemon_does_not_survive_a_cancel, [24], "A double fork that outlives a cancelled command",
            Harmless by "supervisor: the whole tree; seccomp"),
        attack!(a_stopped_tree_still_times_out, [25], "Processes that stop themselves before their time is over",
            Harmless by "supervisor's own clock"),
        attack!(the_watchdog_can_not_be_starved, [25], "The clock, priorities, limits and descriptors of the supervisor",
            Denied by "seccomp, no capabilities"),
        attack!(short_lived_processes_are_counted, [25], "Work for a processor in processes that end before anybody looks",
            Harmless by local cpu "cgroup" else "watchdog" docker "cgroup"),
        attack!(a_busy_machine_hides_no_flood, [25], "A flood behind processes that keep every processor busy",
            Harmless by "watchdog"),
    ]
}

async fn a_fork_bomb_is_contained(ctx: &Ctx) -> CaseResult {
    const LIMIT: u32 = 48;
    // What is not the commands' own, with room: a crowd without a limit is far larger.
    const BESIDE: u32 = 64;
    let mut spec = ctx.spec.clone();
    spec.limits.processes = LIMIT;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    let alive = async || loop {
        match sh(&sandbox, "echo alive").await {
            Ok(output) if output.out == "alive\n" => return Ok::<_, Failed>(()),
            _ => ensure!(tokio::time::Instant::now() < limit, "the sandbox does not recover"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    // One that grows as long as it may, and stands for a while.
    let script = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); sleep 8 > /dev/null 2>&1 & done";
    let _crowd = sandbox.exec(ExecRequest::shell(script)).await?;
    let mut before = 0;
    loop {
        let now = sandbox.stats().await?.processes;
        ensure!(now <= LIMIT + BESIDE, "{now} processes");
        if now >= LIMIT / 2 && now == before {
            break;
        }
        ensure!(tokio::time::Instant::now() < limit, "it does not grow: {now}");
        before = now;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    alive().await?;
    // One that nobody could count.
    let bomb = ExecRequest::shell("b() { b | b & }; b; sleep 600").timeout(Duration::from_millis(1500));
    ensure!(run(&sandbox, bomb).await?.result.exit_code != 0, "it ended well");
    alive().await?;
    let now = sandbox.stats().await?.processes;
    ensure!(now <= LIMIT + BESIDE, "{now} processes");
    Ok(())
}

const MEMORY: u64 = 96 << 20;

async fn memory_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = MEMORY;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // tail keeps what it reads until a line ends.
    let hog = ExecRequest::shell("tail /dev/zero").timeout(Duration::from_secs(60));
    let output = run(&sandbox, hog).await?;
    ensure_eq!((output.result.exit_code, output.result.timed_out), (137, false));
    ensure!(output.result.oom_killed, "not recorded as a kill for memory: {:?}", output.result);
    let next = sh(&sandbox, "echo alive").await?;
    ensure_eq!((next.out.as_str(), next.result.oom_killed), ("alive\n", false));
    // What a command left behind is killed when none runs: that is not the next one's end.
    let idle = sandbox.stats().await?.processes;
    sh(&sandbox, "(tail /dev/zero > /dev/null 2>&1 &)").await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    while sandbox.stats().await?.processes > idle {
        ensure!(tokio::time::Instant::now() < limit, "it goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let next = sh(&sandbox, "echo alive").await?;
    ensure_eq!((next.out.as_str(), next.result.oom_killed), ("alive\n", false));
    Ok(())
}

async fn shared_memory_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = MEMORY;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // Into every file system that lies in memory, one after another, whatever a kill leaves of the shell.
    let mounts = sh(&sandbox, "grep -E ' tmpfs | ramfs ' /proc/mounts | cut -d' ' -f2").await?.out;
    let mut held = 0;
    for mount in mounts.lines() {
        let fill = format!("dd if=/dev/zero of={mount}/flood bs=1M count=400");
        run(&sandbox, ExecRequest::shell(fill).timeout(Duration::from_secs(60))).await?;
        let blocks = sh(&sandbox, &format!("stat -c %b {mount}/flood 2>/dev/null || echo 0")).await?.out;
        held += blocks.trim().parse::<u64>().unwrap_or(0) * 512;
    }
    ensure!(held <= 2 * MEMORY, "{held} bytes are held in memory, in {mounts:?}");
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

/// Into a folder that its owner can't list.
const FLOOD: &str = "mkdir h; cd h; chmod 300 .; i=0; while :; do head -c 1048576 /dev/urandom > f$i || exit 9; i=$((i+1)); sleep 0.01; done";
const DISK: u64 = 64 << 20;
/// What a flood may leave. The watchdog looks five times a second and kills at the second look that finds it over: within a second,
/// in which these floods write less than the limit; the rest is for machines that are slow to look.
const LEFT: u64 = 8 * DISK;

async fn the_disk_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let output = run(&sandbox, ExecRequest::shell(FLOOD).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped it");
    let used = sandbox.stats().await?.disk_bytes;
    ensure!((DISK / 2..LEFT).contains(&used), "{used} bytes were written");
    // It is still over: whoever goes on is stopped again, whoever cleans up is not, however long that takes.
    let more = FLOOD.replace("mkdir h; ", "").replace("> f", "> g");
    let output = run(&sandbox, ExecRequest::shell(more).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped the second one");
    let clean = "sleep 1.2; chmod 700 h; rm -r h; echo alive";
    ensure_eq!(sh(&sandbox, clean).await?.out, "alive\n");
    Ok(())
}

/// A hundred deep folders, moved there and back for ever: there is no moment at which a walk meets all of them where they were
/// listed. The flood goes to where `$1` says; it ends where a quota refuses it.
const MOVES: &str = r#"
    cd /workspace; mkdir a b
    for i in $(seq 100); do d=a/$i; for j in $(seq 30); do d=$d/d; done; mkdir -p $d; done
    (while :; do mv a/* b/; mv b/* a/; done) 2> /dev/null &
    (while :; do mv a/1* b/; mv b/1* a/; done) 2> /dev/null &
    n=0
    while :; do
        case $1 in
            beside) head -c 1048576 /dev/urandom > f$n || exit 9;;
            inside) i=$((n%100+1))
                for d in a b a b a b a b a b a b; do head -c 1048576 /dev/urandom > $d/$i/f$n && break; done || exit 9;;
        esac 2> /dev/null
        n=$((n+1)); sleep 0.01
    done"#;

async fn moving_folders_hide_no_flood(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    for place in ["beside", "inside"] {
        let sandbox = ctx.sandbox_with(&spec).await?;
        let flood = ExecRequest::new(["sh", "-c", MOVES, "sh", place]);
        // Seconds, and minutes where every instruction is emulated.
        let output = run(&sandbox, flood.timeout(Duration::from_secs(200))).await?;
        ensure!(!output.result.timed_out, "{place}: nobody stopped it");
        let used = sandbox.stats().await?.disk_bytes;
        ensure!((DISK / 2..LEFT).contains(&used), "{place}: {used} bytes were written");
        ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    }
    // Who only moves is left alone, and nothing that stands still for a moment is lost.
    let sandbox = ctx.sandbox_with(&spec).await?;
    let mover = MOVES.split("n=0").next().unwrap_or_default();
    let quiet = ExecRequest::shell(format!("{mover} sleep 3; echo alive; kill -KILL 0"));
    ensure_eq!(run(&sandbox, quiet.timeout(Duration::from_secs(60))).await?.out, "alive\n");
    Ok(())
}

/// Of terminals, and of what watches files, that another sandbox still gets.
const ENOUGH: u64 = 8;

/// A MiB a line; it ends where a quota refuses it.
const NAMELESS: &str =
    "exec 3> f; rm f; while head -c 1048576 /dev/urandom >&3; do echo; sleep 0.01; done; exit 9";

async fn nameless_files_are_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let output = run(&sandbox, ExecRequest::shell(NAMELESS).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped it");
    let written = output.out.lines().count() as u64 * (1 << 20);
    ensure!((DISK / 2..LEFT).contains(&written), "{written} bytes were written");
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn hidden_files_are_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    for way in ["closed", "mapped", "closed-mapped", "passed", "thread", "survivor"] {
        let sandbox = ctx.sandbox_with(&spec).await?;
        bring_probe(&sandbox).await?;
        let hold = ExecRequest::new([PROBE, "probe", "hold", way, "/workspace"]);
        let output = run(&sandbox, hold.timeout(Duration::from_secs(60))).await?;
        ensure!(!output.result.timed_out, "{way}: nobody stopped it");
        let written = output.out.lines().count() as u64 * (1 << 20);
        // Several standstills are what it takes here.
        ensure!((DISK / 2..2 * LEFT).contains(&written), "{way}: {written} bytes were written");
        ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    }
    // Who only seems to hide is seen, so that it need not be suspected.
    let local = ctx.provider.capabilities().provider == ProviderKind::Local;
    for way in ["thread", "survivor", "closed"].iter().filter(|way| local || **way != "closed") {
        let sandbox = ctx.sandbox().await?;
        bring_probe(&sandbox).await?;
        let holding = sandbox.exec(ExecRequest::new([PROBE, "probe", "hold", way, "/workspace"])).await?;
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while sandbox.stats().await?.disk_bytes < DISK {
            ensure!(tokio::time::Instant::now() < limit, "{way}: it is not seen");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(holding);
    }
    Ok(())
}

async fn terminals_and_watchers_are_left(ctx: &Ctx) -> CaseResult {
    for what in ["terminals", "watchers"] {
        let greedy = ctx.sandbox().await?;
        bring_probe(&greedy).await?;
        let mut taking = greedy.exec(ExecRequest::new([PROBE, "probe", "take", what])).await?;
        ensure!(taking.events.recv().await.is_some(), "{what}: it did not begin");
        // Another sandbox has its own: it gets as many, also where both are of one user.
        let other = ctx.sandbox().await?;
        bring_probe(&other).await?;
        let count = format!("timeout 1 {PROBE} probe take {what} | cut -d' ' -f1");
        let count = sh(&other, &count).await?.out;
        ensure!(count.trim().parse::<u64>().is_ok_and(|count| count >= ENOUGH), "{what}: {count:?} are left");
        drop(taking);
    }
    Ok(())
}

async fn inodes_are_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    let flood = ExecRequest::new([PROBE, "probe", "inodes", "/workspace/flood"]);
    let output = run(&sandbox, flood.timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped it");
    // At 4 KiB each; the rest is what a second or two of a fast machine adds.
    let entries = DISK / 4096;
    let count = sh(&sandbox, "find /workspace/flood | wc -l").await?.out;
    let count: u64 = count.trim().parse().unwrap_or(u64::MAX);
    ensure!(count < 40 * entries, "{count} files were made");
    ensure_eq!(sh(&sandbox, "rm -rf /workspace/flood; echo alive").await?.out, "alive\n");
    Ok(())
}

async fn an_output_flood_is_contained(ctx: &Ctx) -> CaseResult {
    const CALLS: usize = 24;
    let sandbox = ctx.sandbox().await?;
    let mut floods = Vec::new();
    for number in 0..CALLS {
        let call = CallId::new(format!("yes{number}")).expect("an id");
        let request = ExecRequest { call: Some(call), ..ExecRequest::shell("yes >&2 & yes") };
        floods.push(sandbox.exec(request.timeout(Duration::from_millis(1500))).await?);
    }
    let mut passed = 0;
    for flood in floods {
        let (result, out, err) = flood.output().await?;
        for stream in [&out, &err] {
            ensure!(
                stream.len() as u64 <= ExecRequest::DEFAULT_MAX_OUTPUT,
                "{} bytes were passed on",
                stream.len()
            );
        }
        passed += out.len() + err.len();
        ensure!(result.timed_out, "{result:?}");
    }
    // All spools of a sandbox share one bound, whatever the calls ask for.
    ensure!(passed <= 300 << 20, "{passed} bytes were kept");
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

/// Whose disk they fill is the host's.
async fn logs_are_not_reached(ctx: &Ctx) -> CaseResult {
    super::kernel::refused(ctx, &["23"]).await
}

async fn a_double_fork_dies_with_the_sandbox(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let mark = format!("86{}", std::process::id());
    sh(
        &sandbox,
        &format!("(setsid sh -c 'trap \"\" HUP TERM; sleep {mark}; sleep {mark}' >/dev/null 2>&1 &)"),
    )
    .await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(20);
    while !host_runs(&mark) {
        ensure!(tokio::time::Instant::now() < limit, "the attempt did not start");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ctx.provider.destroy(sandbox.id()).await?;
    ensure!(!host_runs(&mark), "it outlived its sandbox");
    Ok(())
}

/// Whether a process of this machine has the word among its arguments.
fn host_runs(word: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|arg| arg == word.as_bytes())
    })
}

async fn hopping_processes_do_not_survive_a_cancel(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    for round in 0..3 {
        let file = format!("/workspace/hops{round}");
        let hop = ExecRequest::new([PROBE, "probe", "hop", &file]).timeout(Duration::from_secs(3));
        let output = run(&sandbox, hop).await?;
        ensure!(output.result.timed_out, "it ended by itself: {}", output.result.exit_code);
        let size = sh(&sandbox, &format!("wc -c < {file}")).await?.out;
        let later = sh(&sandbox, &format!("sleep 0.5; wc -c < {file}")).await?.out;
        ensure_eq!(size, later);
        ensure!(size.trim().parse::<u64>().is_ok_and(|size| size > 0), "it did not hop");
    }
    Ok(())
}

/// Stops whoever can be stopped, commands before they are themselves too.
const STOPS_ALL: &str = "while :; do kill -STOP -1; done";

async fn who_stops_everybody_stops_nobody_else(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let stopper = sandbox.exec(ExecRequest::shell(STOPS_ALL)).await?;
    for _ in 0..30 {
        // It is answered, one way or the other.
        match sandbox.exec(ExecRequest::new(["true"]).timeout(Duration::from_millis(100))).await {
            Ok(exec) => drop(exec.output().await?),
            Err(e) => ensure!(e.kind == ErrorKind::Unavailable, "{e}"),
        }
    }
    ensure!(sandbox.health().await?.healthy, "the supervisor is not well");
    drop(stopper);
    let begun = std::time::Instant::now();
    while sandbox.exec(ExecRequest::new(["true"])).await.is_err() {
        ensure!(begun.elapsed() < Duration::from_secs(20), "commands are still stopped");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn a_daemon_does_not_survive_a_cancel(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "(setsid sh -c 'trap \"\" HUP TERM INT; while :; do echo x >> beat; sleep 0.02; done' &) ; while [ ! -s beat ]; do sleep 0.01; done; echo up; sleep 600";
    let mut command = sandbox.exec(ExecRequest::shell(script)).await?;
    ensure!(command.events.recv().await.is_some(), "it did not start");
    command.control.signal(Signal::Kill).await?;
    let (result, ..) = command.output().await?;
    ensure_eq!(result.exit_code, 137);
    let size = async || sandbox.stat("beat").await.map_or(0, |info| info.size);
    let before = size().await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    ensure_eq!(size().await, before);
    // Nor are there other ways out of the tree.
    super::kernel::refused(ctx, &["24"]).await
}

async fn a_stopped_tree_still_times_out(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let games = ExecRequest::shell(
        "trap '' TERM INT HUP; nice -n 19 sh -c 'kill -STOP $$' & kill -STOP $$; sleep 600",
    );
    let output = run(&sandbox, games.timeout(Duration::from_millis(700))).await?;
    ensure_eq!((output.result.exit_code, output.result.timed_out), (124, true));
    Ok(())
}

async fn the_watchdog_can_not_be_starved(ctx: &Ctx) -> CaseResult {
    super::kernel::refused(ctx, &["25"]).await
}

async fn short_lived_processes_are_counted(ctx: &Ctx) -> CaseResult {
    const CPUS: f64 = 0.2;
    let mut spec = ctx.spec.clone();
    spec.limits.cpus = CPUS;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // Each ends in a hundredth of a second. The shell's own figures say what they used.
    let script = "end=$(($(date +%s)+6)); while [ $(date +%s) -lt $end ]; do \
        (i=0; while [ $i -lt 4000 ]; do i=$((i+1)); done); done; times";
    let begun = std::time::Instant::now();
    let output = run(&sandbox, ExecRequest::shell(script).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "it was stopped, and never went on");
    let took = begun.elapsed().as_secs_f64();
    let mut used = 0.0;
    for word in output.out.lines().take(2).flat_map(str::split_whitespace) {
        let (minutes, seconds) = word.trim_end_matches('s').split_once('m').unwrap_or(("", ""));
        let (minutes, seconds) = (minutes.parse::<f64>(), seconds.parse::<f64>());
        let (Ok(minutes), Ok(seconds)) = (minutes, seconds) else {
            return Err(crate::conformance::Failed::new(format!("not times: {:?}", output.out)));
        };
        used += 60.0 * minutes + seconds;
    }
    // A look or two are over before it rests, and a machine that is busy elsewhere gives less.
    ensure!(used <= 1.5 * CPUS * took + 0.6, "{used} s of a processor in {took} s");
    Ok(())
}

async fn a_busy_machine_hides_no_flood(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = DISK;
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    // First every way to hold the supervisor back, then the flood among busy neighbours.
    probe(&sandbox, &["25"]).await?;
    let script = format!("i=0; while [ $i -lt 8 ]; do (while :; do :; done) & i=$((i+1)); done; {FLOOD}");
    // Seconds, and minutes where every instruction is emulated.
    let output = run(&sandbox, ExecRequest::shell(script).timeout(Duration::from_secs(400))).await?;
    ensure!(!output.result.timed_out, "nobody stopped it");
    ensure_eq!(sh(&sandbox, "chmod -R 700 h; rm -r h; echo alive").await?.out, "alive\n");
    Ok(())
}
