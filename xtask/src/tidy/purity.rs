//! The core decides and does nothing else; settings are read in one place.

use super::{Finding, Text, source};

const CORE: &str = "crates/forkyard-core/src/";

/// What must not occur in the core's code, and what it would bring in.
const IMPURE: &[(&str, &str)] = &[
    ("async", "async"),
    ("await", "async"),
    ("tokio", "async"),
    ("Instant", "a clock"),
    ("SystemTime", "a clock"),
    ("HashMap", "an unordered map"),
    ("HashSet", "an unordered set"),
    ("rand", "randomness"),
    ("RandomState", "randomness"),
    ("fs", "IO"),
    ("std::io", "IO"),
    ("std::net", "IO"),
    ("std::env", "IO"),
    ("std::process", "IO"),
    ("std::thread", "threads"),
    ("thread_local", "threads"),
    ("println", "IO"),
    ("eprintln", "IO"),
    ("static mut", "shared state"),
    ("unsafe", "what a pure crate does not need"),
];

/// Ways to read the environment.
const ENV: &[&str] = &["env::var", "env::var_os", "env::vars", "env::vars_os"];

/// Who may, and why.
const ENV_READERS: &[(&str, &str)] = &[
    ("crates/forkyard/src/settings/", "the one place where settings are resolved"),
    ("crates/forkyard-guest/", "inside a sandbox there are no settings: its environment is its input"),
    ("crates/test-support/", "tests are told their scale by the environment"),
    ("xtask/", "no part of the product"),
];

pub fn check(texts: &[Text]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for t in texts.iter().filter(|t| t.path.ends_with(".rs")) {
        // A build script is told everything by its environment.
        let in_build = t.path.ends_with("/build.rs");
        let in_tests =
            t.path.contains("/tests/") || t.path.contains("/examples/") || t.path.contains("/benches/");
        let may_read = in_tests || in_build || ENV_READERS.iter().any(|(p, _)| t.path.starts_with(p));
        for (i, line) in source::code(&t.text).iter().enumerate() {
            if t.path.starts_with(CORE)
                && let Some((word, what)) = IMPURE.iter().find(|(w, _)| source::has_word(line, w))
            {
                findings.push(Finding::new(
                    &t.path,
                    i + 1,
                    format!("`{word}` brings {what} into the pure core"),
                ));
            }
            if !may_read && ENV.iter().any(|w| source::has_word(line, w)) {
                let text = "reads the environment: settings do that, once, and pass the value on";
                findings.push(Finding::new(&t.path, i + 1, text));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impurity_is_found_in_the_core_alone() {
        let text = |path: &str, text: &str| Text { path: path.into(), text: text.into() };
        let found = check(&[
            text(
                "crates/forkyard-core/src/a.rs",
                "use std::collections::HashMap;\n// HashMap\nlet s = \"async\";",
            ),
            text("crates/forkyard-core/src/b.rs", "fn a() {}\n#[cfg(test)]\nmod tests {\nuse std::fs; }"),
            text(
                "crates/forkyard-store/src/a.rs",
                "use std::collections::HashMap;\nlet x = std::env::var(\"X\");",
            ),
            text("crates/forkyard/src/settings/env.rs", "std::env::vars_os()"),
            text("crates/forkyard/tests/it/a.rs", "std::env::var(\"X\")"),
        ]);
        let found: Vec<String> = found.iter().map(|f| format!("{}:{}", f.path, f.line)).collect();
        assert_eq!(found, ["crates/forkyard-core/src/a.rs:1", "crates/forkyard-store/src/a.rs:2"]);
    }
}
