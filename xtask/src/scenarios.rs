//! The long tests and the benchmarks, as data. To add one: write a test that obeys `FORKYARD_TEST_SCALE`, or an example that
//! prints a Markdown table (lines that start with `|` end up in the report), and put its command line here.

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Soak,
    Bench,
}

pub struct Scenario {
    pub kind: Kind,
    pub name: &'static str,
    /// What it shows, in one line of the report.
    pub shows: &'static str,
    /// Arguments of cargo.
    pub cargo: &'static [&'static str],
    /// On top of FORKYARD_TEST_REQUIRE=1 and FORKYARD_TEST_SCALE=full.
    pub env: &'static [(&'static str, &'static str)],
}

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        kind: Kind::Soak,
        name: "all-tests",
        shows: "every test of the workspace at its full counts",
        cargo: &["nextest", "run", "--release", "--workspace", "--no-fail-fast", "--profile", "soak"],
        env: &[],
    },
    Scenario {
        kind: Kind::Soak,
        name: "simulation",
        shows: "a million seeds of the deterministic simulation without a breach",
        cargo: &[
            "run",
            "--release",
            "-p",
            "test-support",
            "--features",
            "sim",
            "--example",
            "simulate",
            "--",
            "--seeds",
            "1000000",
        ],
        env: &[],
    },
    Scenario {
        kind: Kind::Soak,
        name: "processes",
        shows: "50 kill -9 of drivers under 20 runs of 8 forks on each store, stops, a full disk, a dying PostgreSQL",
        cargo: &[
            "nextest",
            "run",
            "--release",
            "-p",
            "forkyard-engine",
            "--no-fail-fast",
            "--profile",
            "soak",
            "processes::",
        ],
        env: &[],
    },
    Scenario {
        kind: Kind::Soak,
        name: "machine",
        shows: "the local provider's suites on Debian's own kernel with cgroup v2, as root and as an ordinary user with and without delegated cgroups",
        cargo: &["xtask", "vm", "--scale", "full"],
        env: &[],
    },
    Scenario {
        kind: Kind::Soak,
        name: "killed-forks",
        shows: "kill -9 of `forkyard fork` at 30 random moments, resumed each time: the same outcome",
        cargo: &["nextest", "run", "--release", "-p", "forkyard", "--no-fail-fast", "crash::"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "core",
        shows: "a machine's answer to one input, a run of 100,000 events rebuilt, 10,000 live forks in one process",
        cargo: &["run", "--release", "-p", "forkyard-engine", "--example", "bench_core"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "engine",
        shows: "command latency and takeover between processes, as distributions",
        cargo: &["run", "--release", "-p", "forkyard-engine", "--example", "bench_engine"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "store",
        shows: "durable appends against a bare SQLite loop, long reads, commands to another process",
        cargo: &["run", "--release", "-p", "forkyard-store", "--example", "bench_store"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "server",
        shows: "events to 400 watchers of 100 runs and of one, answers with 10,000 runs and a million events",
        cargo: &["run", "--release", "-p", "forkyard-server", "--example", "bench_server"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "sandbox",
        shows: "local sandboxes beside bubblewrap, Docker and a plain spawn, as root and as an ordinary user; 100 at once, 1,000 alive",
        cargo: &["run", "--release", "-p", "forkyard", "--", "bench", "sandbox", "--markdown"],
        env: &[],
    },
    Scenario {
        kind: Kind::Bench,
        name: "forks",
        shows: "20 forks of a repository of 1 GiB and 50,000 files beside 20 clones and 20 worktrees; 100 forks in one process",
        cargo: &["run", "--release", "-p", "forkyard-engine", "--example", "bench_forks"],
        env: &[],
    },
];
