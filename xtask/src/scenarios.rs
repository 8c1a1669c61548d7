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
        kind: Kind::Bench,
        name: "store",
        shows: "durable appends against a bare SQLite loop, long reads, commands to another process",
        cargo: &["run", "--release", "-p", "forkyard-store", "--example", "bench_store"],
        env: &[],
    },
];
