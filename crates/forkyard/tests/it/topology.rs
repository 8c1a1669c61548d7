//! The compose file, as processes: what it says of workers and of Prometheus, on hosts of their own, without its images.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use test_support::net::Net;
use test_support::postgres::Postgres;
use test_support::temporal::Temporal;

use super::World;
use super::observe::{Prometheus, until};
use super::temporal::Worker;

fn deployed(name: &str) -> (String, Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let value = serde_norway::from_str(&text).unwrap();
    (text, value)
}

/// A service's part of the compose file, with what it takes over from elsewhere.
fn part<'a>(compose: &'a Value, service: &str, key: &str) -> &'a Value {
    let own = &compose["services"][service];
    if own[key].is_null() { &own["<<"][key] } else { &own[key] }
}

/// `${NAME:-default}` without the variable.
fn by_default(text: &str) -> String {
    let Some((before, rest)) = text.split_once("${") else { return text.to_string() };
    let (variable, after) = rest.split_once('}').unwrap();
    let (_, default) = variable.split_once(":-").unwrap();
    format!("{before}{default}{}", by_default(after))
}

/// What our own reading of it would not notice: unknown keys, volumes and dependencies that are not there.
#[test]
fn the_compose_file_is_one_for_compose() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/compose.yaml");
    let mut compose = Command::new("docker-compose");
    compose.arg("-f").arg(file).args(["config", "-q"]).env_remove("POSTGRES_PASSWORD").stdin(Stdio::null());
    let ran = match compose.output() {
        Ok(ran) => ran,
        Err(e) if std::env::var_os("FORKYARD_TEST_REQUIRE").is_none() => {
            eprintln!("docker-compose is missing: {e}");
            return;
        }
        Err(e) => panic!("docker-compose is missing, cargo xtask setup: {e}"),
    };
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && !said.contains("is not set"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_compose_file_s_topology_works() {
    let Some(net) = Net::new() else { return };
    let at = net.address();
    let Some(temporal) = tokio::task::block_in_place(|| Temporal::start_at(at)) else { return };
    let database = tokio::task::block_in_place(|| Postgres::start_at(at).database());
    let w = World::with_commit();
    let (_, compose) = deployed("compose.yaml");
    let named = |text: &str| {
        let store = by_default("postgres://forkyard:${POSTGRES_PASSWORD:-forkyard}@postgres/forkyard");
        by_default(text).replace(&store, &database).replace("temporal:7233", &temporal.address())
    };
    let mut workers = vec![];
    let mut environment: Vec<(String, String)> = vec![];
    for (host, service) in [(0, "worker-1"), (1, "worker-2")] {
        let command = part(&compose, service, "command").as_array().unwrap();
        let variables = part(&compose, service, "environment").as_object().unwrap();
        environment = variables.iter().map(|(k, v)| (k.clone(), named(v.as_str().unwrap()))).collect();
        assert!(
            environment.iter().any(|(_, v)| *v == database)
                && environment.iter().any(|(_, v)| *v == temporal.address())
        );
        let log = std::fs::File::create(w.dir.path().join(service)).unwrap();
        let child = Net::enter(&net.netns(host), env!("CARGO_BIN_EXE_forkyard"))
            .args(command.iter().map(|a| a.as_str().unwrap()))
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            // Its volume.
            .env("FORKYARD_HOME", w.dir.path().join(format!("{service}-home")))
            .envs(environment.clone())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        workers.push(Worker(child));
    }
    let (scraped, _) = deployed("prometheus.yaml");
    let scraped = scraped
        .replace("worker-1:", &format!("{}:", net.address_of(0)))
        .replace("worker-2:", &format!("{}:", net.address_of(1)));
    let config = format!("global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n{scraped}");
    let Some(prometheus) = Prometheus::start(w.dir.path(), &config) else { return };

    let model = w.model();
    // A URL, since the workers' hosts fetch it themselves.
    let repo = format!("file://{}", w.repo().display());
    let args = [
        "fork",
        &repo,
        "-p",
        "add a line",
        "-m",
        &model,
        "--network",
        "none",
        "-f",
        "4",
        "--json",
        "--engine",
        "temporal",
    ];
    let variables: Vec<(&str, &str)> = environment.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let ran = tokio::task::block_in_place(|| w.run_with(&args, &variables));
    let logs = || {
        ["worker-1", "worker-2"].map(|n| std::fs::read_to_string(w.dir.path().join(n)).unwrap_or_default())
    };
    assert_eq!(ran.code, 0, "{}{}{:?}", ran.stdout, ran.stderr, logs());
    let last: Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&last["outcome"], last["results"].as_array().map(Vec::len)),
        (&"success".into(), Some(4)),
        "{last}"
    );

    // This host has collected nothing, and shows it all the same.
    let run = last["run"].as_str().unwrap();
    let seen = |args: &[&str]| tokio::task::block_in_place(|| w.run_with(args, &variables));
    let diff = seen(&["diff", &format!("{run}/0"), "--stat"]);
    assert_eq!((diff.code, diff.stdout.as_str()), (0, "M  +1  -0  a.txt\n"), "{}", diff.stderr);
    let compared = seen(&["compare", run]);
    assert_eq!(compared.code, 0, "{}", compared.stderr);

    for expr in [
        "count(up{job=\"forkyard\"} == 1)",
        "count(count by (instance) (forkyard_store_up{job=\"forkyard\"} == 1))",
        "count(count by (instance) (temporal_num_pollers{job=\"forkyard\"}))",
    ] {
        until(expr, async || {
            let found = prometheus.query(expr).await?;
            (found.first()?["value"][1] == "2").then_some(())
        })
        .await;
    }
    until("the run's forks are counted, once", async || {
        let found = prometheus.query("sum(sandbox_fork_completed_total)").await?;
        (found.first()?["value"][1] == "4").then_some(())
    })
    .await;
}
