use super::resolve::SourceFile;
use std::collections::BTreeSet;

use forkyard_core::sandbox::NetworkMode;
use forkyard_core::{Millis, Usd};

use super::*;

fn file(path: &str, text: &str) -> Option<SourceFile> {
    Some(SourceFile { path: path.into(), text: text.into() })
}

fn env(pairs: &[(&str, &str)]) -> Sources {
    Sources { env: pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(), ..Sources::default() }
}

fn problems(sources: &Sources) -> String {
    resolve(sources).unwrap_err().to_string()
}

#[test]
fn defaults_are_those_of_the_reference() {
    let s = resolve(&Sources::default()).unwrap().settings;
    assert_eq!((s.forks, s.max_concurrent, s.timeout, s.budget), (1, 5, Millis::secs(7200), None));
    assert_eq!((s.model.as_str(), s.memory, s.cpus), ("sonnet", ByteSize(4 << 30), 2.0));
    assert_eq!((s.metrics, s.metrics_port, s.network), (true, 9090, NetworkMode::Isolated));
    assert_eq!(s.temporal_task_queue, "sandbox-orchestration");
    assert!(s.protect.is_empty() && s.anthropic_api_key.is_none());
}

#[test]
fn the_table_is_sound() {
    let mut keys = BTreeSet::new();
    let mut vars = BTreeSet::new();
    for s in TABLE {
        assert!(keys.insert(s.key), "{} twice", s.key);
        assert!(s.doc.trim().ends_with('.'), "{}: {:?}", s.key, s.doc);
        for v in s.env {
            assert!(vars.insert(v.name), "{} twice", v.name);
        }
        assert!(!(s.project && s.is_secret()), "{}", s.key);
    }
    // A key can't be a value and a table at once.
    for s in TABLE {
        assert!(!keys.iter().any(|k| k.starts_with(&format!("{}.", s.key))), "{}", s.key);
    }
}

/// A setting that nothing reads is a promise that nobody keeps.
#[test]
fn every_setting_has_a_reader() {
    /// Read by what is still being built: cloud providers.
    const AHEAD: &[&str] = &["e2b_api_key", "daytona_api_key"];
    fn collect(dir: &std::path::Path, text: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && path.file_name().is_some_and(|n| n != "settings") {
                collect(&path, text);
            } else if path.extension().is_some_and(|e| e == "rs") {
                text.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut text = String::new();
    collect(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut text);
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_read = |field: &str| {
        ["s", "settings"].iter().any(|of| {
            let access = format!("{of}.{field}");
            text.match_indices(&access)
                .any(|(at, _)| !text[at + access.len()..].starts_with(word) && !text[..at].ends_with(word))
        })
    };
    assert_eq!(table::FIELDS.len(), TABLE.len());
    for (field, setting) in table::FIELDS.iter().zip(TABLE) {
        let ahead = AHEAD.contains(field);
        assert!(is_read(field) || ahead, "nothing reads `{}`: use it or remove it", setting.key);
        assert!(!(is_read(field) && ahead), "`{}` is read: take it off the list", setting.key);
    }
}

#[test]
fn what_a_project_may_set_acts_inside_alone() {
    let allowed: Vec<&str> = TABLE.iter().filter(|s| s.project).map(|s| s.key).collect();
    assert_eq!(
        allowed,
        [
            "run.max_turns",
            "run.max_tool_calls",
            "run.setup",
            "run.verify",
            "run.score",
            "run.protect",
            "run.capture",
            "run.prompt_prefix",
            "sandbox.memory",
            "sandbox.cpus",
            "sandbox.disk",
            "sandbox.processes",
            "sandbox.env",
            "network.rate",
        ]
    );
}

#[test]
fn stronger_sources_win_and_are_named() {
    let mut sources = Sources {
        user_file: file("c.toml", "[run]\nmax_turns = 1\nsetup = \"user\"\ntimeout = 60\n"),
        project_file: file("p.toml", "[run]\nmax_turns = 2\nsetup = \"project\"\n"),
        ..env(&[("FORKYARD_MAX_TURNS", "3")])
    };
    let origin = |sources: &Sources, key: &str| {
        let r = resolve(sources).unwrap();
        let e = r.effective.iter().find(|e| e.setting.key == key).unwrap();
        format!("{} from {}", e.shown, e.origin)
    };
    assert_eq!(origin(&sources, "run.timeout"), "1m from c.toml:4");
    assert_eq!(origin(&sources, "run.setup"), "project from p.toml:3");
    assert_eq!(origin(&sources, "run.max_turns"), "3 from $FORKYARD_MAX_TURNS");
    sources.flags.push(("run.max_turns", "--max-turns".into(), Raw::Text("4".into())));
    assert_eq!(origin(&sources, "run.max_turns"), "4 from --max-turns");
    assert_eq!(origin(&sources, "run.forks"), "1 from default");
}

#[test]
fn unknown_keys_name_the_line_and_the_nearest() {
    let text = "modle = \"x\"\n[run]\ntimout = \"1h\"\n[sandbox]\nbudget = 5\n[zzz]\nqqq = 1\n";
    let sources = Sources { user_file: file("c.toml", text), ..Sources::default() };
    assert_eq!(
        problems(&sources),
        "c.toml:1: unknown key `modle`; did you mean `model`?\n\
         c.toml:3: unknown key `run.timout`; did you mean `run.timeout`?\n\
         c.toml:5: unknown key `sandbox.budget`; did you mean `run.budget`?\n\
         c.toml:7: unknown key `zzz.qqq`; `forkyard config` lists the known ones"
    );
}

#[test]
fn bad_values_name_the_field_the_value_and_the_fix() {
    let sources = Sources {
        user_file: file("c.toml", "[run]\nforks = 0\ntimeout = \"soon\"\n[network]\nmode = \"open\"\n"),
        ..env(&[("FORKYARD_BUDGET", "-1"), ("METRICS_PORT", "70000"), ("DISABLE_METRICS", "maybe")])
    };
    let text = problems(&sources);
    for expected in [
        "c.toml:2: `run.forks` = \"0\" can't be used; write something from 1 to 100",
        "c.toml:3: `run.timeout` = \"soon\" can't be used; write a duration like 90s, 15m, 2h, 1h30m or 1d",
        "c.toml:5: `network.mode` = \"open\" can't be used; write `none` | `isolated` | `bridge`",
        "$FORKYARD_BUDGET: `run.budget` = \"-1\" can't be used; write an amount like $5",
        "$METRICS_PORT: `metrics.port` = \"70000\" can't be used; write a whole number up to 65535",
        "$DISABLE_METRICS: \"maybe\" is neither; write true or false",
    ] {
        assert!(text.contains(expected), "{expected}\nin\n{text}");
    }
}

#[test]
fn values_that_contradict_each_other_are_found() {
    let text = "[run]\nforks = 50\nmax_forks = 10\n[engine]\nheartbeat_interval = \"60s\"\n[temporal]\ntls_key = \"/k\"\n\
                [anthropic]\nbase_url = \"ftp://x\"\n[sandbox]\nvolumes = [\"a:b\"]\nenv = { \"A B\" = \"1\" }\n";
    let text = problems(&Sources { user_file: file("c.toml", text), ..Sources::default() });
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn a_project_may_not_set_what_reaches_outside() {
    let text = "model = \"opus\"\n[network]\nallow = [\"evil.example\"]\n[run]\nverify = \"make\"\nbudget = 1000\n\
                [anthropic]\nbase_url = \"http://evil.example\"\n[sandbox]\nvolumes = [\"/etc:/x\"]\n";
    let mut sources = Sources { project_file: file("forkyard.toml", text), ..Sources::default() };
    let found = problems(&sources);
    for key in ["model", "network.allow", "run.budget", "anthropic.base_url", "sandbox.volumes"] {
        assert!(found.contains(&format!("may not set `{key}` unless you trust it")), "{key}: {found}");
    }
    assert!(!found.contains("run.verify"));
    sources.project_trusted = true;
    let s = resolve(&sources).unwrap().settings;
    assert_eq!((s.allow, s.budget), (vec!["evil.example".to_string()], Some(Usd::dollars(1000))));
}

#[test]
fn well_known_variables_mean_what_they_say() {
    for (value, expected) in [("false", true), ("0", true), ("true", false), ("1", false), ("", true)] {
        assert_eq!(
            resolve(&env(&[("DISABLE_METRICS", value)])).unwrap().settings.metrics,
            expected,
            "{value:?}"
        );
    }
    let s = resolve(&env(&[
        ("SANDBOX_MEMORY_GB", "6"),
        ("SANDBOX_DISK_GB", "512MiB"),
        ("SANDBOX_CPU", "0.5"),
        ("TEMPORAL_TASK_QUEUE", "q"),
        ("ANTHROPIC_API_KEY", "sk-x"),
        ("ANTHROPIC_BASE_URL", "http://127.0.0.1:1"),
    ]))
    .unwrap()
    .settings;
    assert_eq!((s.memory, s.disk, s.cpus), (ByteSize(6 << 30), ByteSize(512 << 20), 0.5));
    assert_eq!((s.temporal_task_queue.as_str(), s.anthropic_api_key.unwrap().expose()), ("q", "sk-x"));
}

#[test]
fn secrets_never_show() {
    let sources = env(&[
        ("ANTHROPIC_API_KEY", "hunter2"),
        ("FORKYARD_STORE", "postgres://u:hunter2@h/d?password=hunter2"),
    ]);
    let r = resolve(&sources).unwrap();
    let all = format!("{r:?}{}", r.effective.iter().map(|e| e.json.to_string()).collect::<String>());
    assert!(!all.contains("hunter2"), "{all}");
    let bad = problems(&env(&[("GITHUB_TOKEN", "hunter2\nX: y")]));
    assert!(!bad.contains("hunter2") && bad.contains("github.token"), "{bad}");
    let bad = problems(&env(&[("FORKYARD_STORE", "mysql://u:hunter2@h")]));
    assert!(!bad.contains("hunter2"), "{bad}");
}

#[test]
fn misspelt_variables_are_pointed_out() {
    let r = resolve(&env(&[("FORKYARD_MODLE", "x"), ("FORKYARD_TEST_SCALE", "ci"), ("FORKYARD_HOME", "/x")]))
        .unwrap();
    assert_eq!(r.warnings.len(), 1);
    assert_eq!(
        r.warnings[0].to_string(),
        "$FORKYARD_MODLE: no setting reads this variable; did you mean $FORKYARD_MODEL?"
    );
    let r = resolve(&env(&[("NO_COLOR", "1"), ("FORKYARD_COLOR", "always")])).unwrap();
    assert_eq!(r.settings.color, ColorMode::Never);
}

#[test]
fn secrets_prices_and_policy_are_tables_of_the_user() {
    let text = "[secrets.gh]\nheader = \"Authorization\"\nenv = \"MY_TOKEN\"\nhosts = [\"api.example.com\"]\n\
                [prices.mine]\ninput = 1.0\noutput = 2.0\n[policy]\nstrict_paths = true\n";
    let mut sources = Sources { user_file: file("c.toml", text), ..env(&[("MY_TOKEN", "hunter2")]) };
    let tables = resolve(&sources).unwrap().settings.tables;
    assert_eq!((tables.secrets["gh"].value.as_str(), tables.secrets["gh"].hosts.len()), ("hunter2", 1));
    assert!(tables.prices.contains_key("mine") && tables.policy.strict_paths);
    assert!(!format!("{tables:?}").contains("hunter2"));
    sources.env.clear();
    assert!(
        problems(&sources).contains("c.toml:1: `secrets.gh`: $MY_TOKEN is not set"),
        "{}",
        problems(&sources)
    );

    let project = Sources { project_file: file("p.toml", text), ..env(&[("MY_TOKEN", "x")]) };
    let found = problems(&project);
    for name in ["secrets", "prices", "policy"] {
        assert!(found.contains(&format!("may not set `{name}`")), "{found}");
    }
    assert_eq!(
        resolve(&Sources { project_trusted: true, ..project }).unwrap().settings.tables.secrets.len(),
        1
    );
}

#[test]
fn mistakes_in_tables_name_their_line() {
    for (text, expected) in [
        ("[policy]\nstrict_path = true\n", "c.toml:2: unknown field `strict_path`"),
        (
            "[secrets.a]\nheader = \"X\"\nvalue = \"v\"\nhosts = []\n",
            "c.toml:1: `secrets.a`: it has no hosts",
        ),
        ("[secrets.a]\nheader = \"X\"\nhosts = [\"h\"]\n", "give exactly one of `value` and `env`"),
        ("[secrets.a]\nheader = \"X\\r\\nY\"\nvalue = \"v\"\nhosts = [\"h\"]\n", "can't be sent"),
        ("polizy = 1\n", "did you mean `policy`?"),
    ] {
        let found = problems(&Sources { user_file: file("c.toml", text), ..Sources::default() });
        assert!(found.contains(expected), "{expected}\nin\n{found}");
    }
}
