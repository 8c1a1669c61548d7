//! The long tests and the benchmarks, as data. To add one: write a test that obeys `FORKYARD_TEST_SCALE`, or an example that
//! prints a Markdown table (lines that start with `|` end up in the report), and put its command line here.

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Soak,
    Bench,
}

/// How a scenario is started. Programs are built once for all, since a package built alone has other features, and is
/// another build.
pub enum Program {
    /// Those of the workspace's tests that a filter of the test runner names.
    Tests(&'static str),
    Cargo(&'static [&'static str]),
    /// An example of any crate, built for release.
    Example(&'static str, &'static [&'static str]),
    /// `forkyard` itself, built for release, with a Docker engine to compare with.
    BesideDocker(&'static [&'static str]),
}

pub struct Scenario {
    pub kind: Kind,
    pub name: &'static str,
    /// What it shows, in one line of the report.
    pub shows: &'static str,
    /// Runs with FORKYARD_TEST_REQUIRE=1 and FORKYARD_TEST_SCALE=full.
    pub program: Program,
}

/// The tests that a filter names, at their full counts.
const fn soaked(name: &'static str, shows: &'static str, filter: &'static str) -> Scenario {
    Scenario { kind: Kind::Soak, name, shows, program: Program::Tests(filter) }
}

pub const SCENARIOS: &[Scenario] = &[
    soaked(
        "core",
        "machines, stores and the embedded engine: every test of them at its full counts",
        "package(forkyard-core) | package(forkyard-store) | package(forkyard-engine) | package(test-support)",
    ),
    soaked(
        "sandboxes",
        "every test of the providers, the guest and egress at its full counts",
        "package(forkyard-sandbox) | package(forkyard-guest)",
    ),
    soaked("agent", "every test of the agent at its full counts", "package(forkyard-agent)"),
    soaked(
        "command-line",
        "every test of the commands, of `serve` and of the dashboard in a browser at its full counts",
        "package(forkyard)",
    ),
    soaked("server", "every test of the API's own crate at its full counts", "package(forkyard-server)"),
    soaked(
        "temporal",
        "every test on a real Temporal service at its full counts",
        "package(forkyard-temporal)",
    ),
    Scenario {
        kind: Kind::Soak,
        name: "simulation",
        shows: "a million seeds of the deterministic simulation without a breach",
        program: Program::Example("simulate", &["--seeds", "1000000"]),
    },
    Scenario {
        kind: Kind::Soak,
        name: "machine",
        shows: "every test of the local provider on Debian's own kernel with cgroup v2, as root and as an ordinary user with and without delegated cgroups (counts as in CI: the processor is emulated)",
        program: Program::Cargo(&["xtask", "vm", "--scale", "full", "--workspace"]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "core",
        shows: "a machine's answer to one input, a run of 100,000 events rebuilt, 10,000 live forks in one process",
        program: Program::Example("bench_core", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "engine",
        shows: "command latency and takeover between processes, as distributions",
        program: Program::Example("bench_engine", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "store",
        shows: "durable appends against a bare SQLite loop, long reads, commands to another process",
        program: Program::Example("bench_store", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "sandbox",
        shows: "local sandboxes beside bubblewrap, Docker and a plain spawn, as root and as an ordinary user; 100 at once, 1,000 alive",
        program: Program::BesideDocker(&["bench", "sandbox", "--markdown"]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "agent",
        shows: "an agent's own time per turn, early and late in a conversation; fifty agents in one process",
        program: Program::Example("bench_agent", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "forks",
        shows: "20 forks of a repository of 1 GiB and 50,000 files beside 20 clones and 20 worktrees; 100 forks in one process",
        program: Program::Example("bench_forks", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "server",
        shows: "events to 400 watchers of 100 runs and of one, answers with 10,000 runs and a million events",
        program: Program::Example("bench_server", &[]),
    },
    Scenario {
        kind: Kind::Bench,
        name: "temporal",
        shows: "runs on a real Temporal service beside the embedded engine and beside bare workflows with one activity; a fork's history",
        program: Program::Example("bench_temporal", &[]),
    },
];
