//! A program written for version 0.1 of the library. It is never run: that it compiles is the promise. A change that breaks it
//! breaks the users of 0.1, and needs a new version; an addition needs a line here.

use std::collections::BTreeMap;
use std::time::Duration;

use forkyard::*;

#[allow(dead_code)]
async fn opening() -> Result<()> {
    let options: Options = Options::new().home("/tmp/x").set("model", "haiku");
    let yard: Forkyard = Forkyard::open(options).await?;
    let _: (Forkyard, Vec<String>) = (yard.clone(), yard.runs(10).await?);
    let _: (Run, Run) = (yard.run("r1").await?, yard.resume("r1").await?);
    let _: (Sandboxes, Agents) = (yard.sandboxes(), yard.agents());
    Ok(())
}

#[allow(dead_code)]
async fn sandboxes(yard: Forkyard) -> Result<()> {
    let config: SandboxConfig = SandboxConfig::new()
        .provider(ProviderKind::Docker)
        .image("node:20-alpine")
        .snapshot("n1")?
        .memory_mb(512)
        .cpus(0.5)
        .disk_mb(1024)
        .processes(64)
        .network_mbps(100)
        .network(NetworkMode::Isolated)
        .allow("example.com:ro")
        .env("A", "1")
        .volume("/data", "/data", false)
        .workdir("/app")
        .timeout(Duration::from_secs(300))
        .lifetime(Duration::from_secs(3600))
        .strict()
        .disk_image();
    let manager: Sandboxes = yard.sandboxes().with_defaults(config.clone());
    let mut sandbox: Sandbox = manager.create(config).await?;
    let command: Command =
        Command::new("node").arg("-v").args(["a"]).env("A", "1").workdir("/").timeout(Duration::ZERO);
    let _: CommandOutput = sandbox.execute(Command::shell("true")).await?;
    let _: CommandOutput = sandbox.execute(command).await?;
    let o = sandbox.run("node", ["-v"]).await?;
    let _: (i32, String, String, Duration) = (o.exit_code, o.stdout.clone(), o.stderr.clone(), o.duration);
    let _: [bool; 4] = [o.timed_out, o.oom_killed, o.truncated, o.success()];
    sandbox.write_file("a", "text").await?;
    sandbox.write_file("a", b"bytes").await?;
    let _: Vec<u8> = sandbox.read_file("a").await?;
    let files: Vec<FileInfo> = sandbox.list_files(".").await?;
    let _: Vec<(&String, FileKind, u64)> = files.iter().map(|f| (&f.name, f.kind, f.size)).collect();
    sandbox.delete_file("a").await?;
    let s: Stats = sandbox.stats().await?;
    let _: (u64, f64, u64, u64, u64, u32) =
        (s.memory_bytes, s.cpu_percent, s.disk_bytes, s.network_rx_bytes, s.network_tx_bytes, s.processes);
    let h: Health = sandbox.health().await?;
    let _: (bool, String) = (h.healthy, h.detail);
    let _: String = sandbox.snapshot().await?;
    sandbox.pause().await?;
    sandbox.resume().await?;
    sandbox.stop().await?;
    sandbox.start().await?;
    sandbox.destroy().await?;
    let _: Sandbox = manager.get(sandbox.id()).await?;
    let _: Vec<String> = manager.list().await?;
    let _: BTreeMap<String, Result<Stats>> = manager.stats_all().await?;
    let _: BTreeMap<String, Result<Health>> = manager.health_all().await?;
    manager.destroy("s1").await?;
    let _: usize = manager.destroy_all().await?;
    Ok(())
}

#[allow(dead_code)]
async fn agents(yard: Forkyard, sandbox: Sandbox) -> Result<()> {
    let task: AgentTask = AgentTask::new("do it")
        .name("n")
        .model("sonnet")
        .system_prompt("you are")
        .sandbox(SandboxConfig::new())
        .inside(&sandbox)
        .auto_cleanup(false)
        .capture("**")
        .max_turns(10)
        .timeout(Duration::from_secs(60))
        .budget(1.0)
        .intercept("*", |request: ToolRequest, _: Sandbox| async move {
            match request.tool.as_str() {
                "Bash" => Verdict::Deny("no".into()),
                "Read" => Verdict::Respond(ToolResponse::text("x")),
                "Write" => Verdict::Rewrite(request.input),
                _ => Verdict::Allow,
            }
        });
    let agents: Agents = yard.agents();
    let r: AgentResult = agents.execute(task.clone()).await?;
    let _: (Option<String>, String, bool, String) = (r.name, r.sandbox_id, r.success, r.output);
    let _: (u32, u32, Vec<String>, u32) = (r.turns, r.tool_calls, r.errors, r.denied);
    let _: (u64, f64, f64, Option<String>) = (r.total_tokens, r.total_cost, r.execution_time, r.error);
    let _: BTreeMap<String, Vec<u8>> = r.files;
    let _: Vec<Result<AgentResult>> = agents.execute_parallel([task]).await;
    for a in agents.active() {
        let _: ActiveAgent = a.clone();
        let _: (String, Option<String>, Option<String>) = (a.sandbox_id, a.name, a.task);
    }
    let _: (Sandbox, usize) = (agents.sandbox("s1").await?, agents.clean_up().await?);
    Ok(())
}

#[allow(dead_code)]
async fn forks(yard: Forkyard) -> Result<()> {
    let fork: ForkOptions = ForkOptions::new("name")
        .prompt("p")
        .model("m")
        .system_prompt("s")
        .memory_mb(1)
        .cpus(1.0)
        .disk_mb(1)
        .image("debian")
        .capture("*");
    let job: Job = Job::new("https://example.com/r", "prompt")
        .prompt("another")
        .branch("main")
        .dirty(false)
        .forks(5)
        .model("sonnet")
        .fork(fork)
        .max_concurrent(5)
        .timeout(Duration::from_secs(7200))
        .budget(5.0)
        .fork_budget(1.0)
        .max_turns(100)
        .setup("make deps")
        .verify("make test")
        .score("make score")
        .protect("tests/**")
        .capture("out/**")
        .until_verified(2, 10)
        .provider(ProviderKind::Local)
        .image("debian")
        .network(NetworkMode::None)
        .allow("example.com")
        .sandbox("s1")
        .secret("token")
        .set("sandbox.memory", "1GiB")
        .keep(false);
    let mut run: Run = yard.start(job).await?;
    let _: &str = run.id();
    let p: Progress = run.progress().await?;
    let _: [u32; 5] = [p.total_forks, p.pending, p.in_progress, p.completed, p.failed];
    let _: Option<Progress> = run.next().await?;
    let r: RunResult = run.wait().await?;
    let _: RunResult = run.result().await?;
    let _: (&str, String, RunStatus, Option<RunOutcome>) = (r.schema, r.run.clone(), r.status, r.outcome);
    let _: (usize, usize, usize, f64) = (r.total_forks, r.successful, r.failed, r.total_cost_usd);
    let _: (Option<u32>, Option<String>) = (r.winner, r.error.clone());
    let t: Totals = r.totals;
    let _: (f64, u64, u64, u64, f64) = (t.success_rate, t.turns, t.tool_calls, t.tokens, t.time);
    let _: [f64; 5] =
        [t.average_turns, t.average_tool_calls, t.average_tokens, t.average_cost, t.average_time];
    let ranking: Option<Ranking> = r.ranking.clone();
    let _: Vec<Ranked> = ranking.map(|r| r.order).unwrap_or_default();
    let _: Option<&ForkResult> = r.best();
    for f in r.results {
        let _: (u32, Option<String>, String, Option<String>) = (f.fork_num, f.name, f.model, f.sandbox_id);
        let _: (String, bool, Option<bool>, Option<f64>) = (f.status, f.success, f.verified, f.score);
        let _: Option<String> = f.score_error;
        let _: (Option<String>, u32, u32, u32) = (f.final_response, f.turns, f.tool_calls, f.errors);
        let _: (u64, f64, f64, Option<DiffStat>) = (f.total_tokens, f.total_cost, f.execution_time, f.diff);
        let _: [Vec<String>; 3] = [f.captured, f.edited_tests, f.put_back];
        let _: (Option<String>, Option<String>) = (f.verify_output, f.error);
    }
    let _: Vec<u8> = run.patch(0).await?;
    let _: BTreeMap<String, Vec<u8>> = run.files(0).await?;
    run.apply_as_branch(0, "b").await?;
    run.message(Some(0), "hi").await?;
    run.pause().await?;
    run.resume().await?;
    run.cancel(None).await?;
    run.add_forks(1).await?;
    Ok(())
}

#[allow(dead_code)]
fn errors(e: Error) -> bool {
    let _: (&String, &Option<String>, &dyn std::error::Error) = (&e.message, &e.hint, &e);
    e.kind == ErrorKind::Invalid || e.kind == ErrorKind::Failed
}

fn assert_send<T: Send + Sync + 'static>() {}

#[test]
fn handles_go_from_thread_to_thread() {
    assert_send::<Forkyard>();
    assert_send::<Sandboxes>();
    assert_send::<Sandbox>();
    assert_send::<Agents>();
    assert_send::<AgentTask>();
    assert_send::<Run>();
    assert_send::<Error>();
}

/// What is public and missing here could change unseen.
#[test]
fn the_program_above_uses_all_of_it() {
    let here = include_str!("api.rs");
    let sources = [
        include_str!("../../src/library/mod.rs"),
        include_str!("../../src/library/agents.rs"),
        include_str!("../../src/library/error.rs"),
        include_str!("../../src/library/runs.rs"),
        include_str!("../../src/library/sandboxes.rs"),
        include_str!("../../src/results.rs"),
    ];
    for line in sources.iter().flat_map(|s| s.lines()) {
        let line = line.trim_start();
        let Some(rest) = line.strip_prefix("pub ") else { continue };
        let rest = rest.trim_start_matches("async ");
        let name = rest
            .strip_prefix("fn ")
            .or_else(|| rest.strip_prefix("struct "))
            .or_else(|| rest.strip_prefix("enum "))
            .or_else(|| rest.split_once(": ").map(|(field, _)| field))
            .map(|r| r.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(r));
        if let Some(name) = name {
            assert!(here.contains(name), "{name} is public and not used here: {line}");
        }
    }
}
