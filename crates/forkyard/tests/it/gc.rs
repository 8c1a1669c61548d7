use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::World;
use super::docker_fixture::{Daemon, IMAGE};

#[test]
fn old_runs_go_with_everything_of_theirs() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    assert!(w.run(&["gc"]).stdout.starts_with("0 runs"));
    let dry = w.run(&["gc", "--older-than", "0s", "--dry-run"]).stdout;
    assert!(dry.contains(&format!("would remove run {run}")), "{dry}");
    assert_ne!(w.git(&["for-each-ref", "refs/forkyard/"]), "");
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([run]), "{done}");
    assert_eq!(done["freed"]["left"], serde_json::json!([]), "{done}");
    assert_eq!(done["freed"]["snapshots"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(w.git(&["for-each-ref", "refs/forkyard/"]), "");
    assert_eq!(w.run(&["status", &run]).code, 2);
    assert!(!w.home().join("logs").join(&run).exists());
    assert_eq!(w.run(&["gc", "--older-than", "soon"]).code, 2);
}

#[test]
fn a_run_whose_sandbox_its_user_keeps_is_not_old() {
    let w = World::with_commit();
    let run = w.ended(&["--keep", "-f", "1"]);
    let kept = w.json(&["sandbox", "list", "--json"])["sandboxes"][0]["id"].as_str().unwrap().to_string();
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([]), "{done}");
    assert!(done["freed"]["left"][0].as_str().unwrap().contains(&kept), "{done}");
    assert_eq!(w.run(&["sandbox", "exec", &kept, "true"]).code, 0, "the next sweep leaves it alone, too");
    assert_eq!(w.run(&["sandbox", "rm", &kept]).code, 0);
    let done = w.json(&["gc", "--older-than", "0s", "--json"]);
    assert_eq!(done["freed"]["runs"], serde_json::json!([run]), "{done}");
}

/// What a dry run says is what then goes, by name.
fn announced_and_done(w: &World) -> Value {
    let [said, done] = [&["--dry-run"][..], &[]].map(|dry| {
        let args: Vec<&str> = ["gc", "--older-than", "0s", "--json"].iter().chain(dry).copied().collect();
        w.json(&args)["freed"].clone()
    });
    for key in ["runs", "snapshots", "captured", "images", "folders", "left"] {
        assert_eq!(said[key], done[key], "{key}: {said}\n{done}");
    }
    done
}

#[test]
fn a_dry_run_names_what_then_goes() {
    let w = World::with_commit();
    let others = [World::with_commit(), World::with_commit()];
    let [gone, stays] = others.each_ref().map(|o| format!("file://{}", o.repo().display()));
    let model = w.model();
    let fork = |repo: &str, more: &[&str]| {
        let args = ["fork", repo, "-p", "x", "-m", &model, "--network", "none", "--capture", "a.txt"];
        let ran = w.run(&args.iter().chain(more).copied().collect::<Vec<_>>());
        assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    };
    fork(".", &[]);
    fork(&gone, &[]);
    fork(&stays, &[]);
    // Its run stays, and with it the cache that has its results.
    fork(&stays, &["--keep"]);
    let done = announced_and_done(&w);
    assert_eq!((done["runs"].as_array().unwrap().len(), &done["captured"]), (3, &3.into()), "{done}");
    assert_eq!(done["left"].as_array().unwrap().len(), 1, "{done}");
    let folders = done["folders"].as_array().unwrap();
    let caches = folders.iter().filter(|f| f.as_str().unwrap().ends_with(".git")).count();
    assert_eq!(caches, 1, "{done}");
    let kept = w.json(&["sandbox", "list", "--json"])["sandboxes"][0]["id"].as_str().unwrap().to_string();
    assert_eq!(w.run(&["sandbox", "rm", &kept]).code, 0);
    let done = announced_and_done(&w);
    assert_eq!(done["runs"].as_array().unwrap().len(), 1, "{done}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prepared_images_are_named_too() {
    let Some(daemon) = Daemon::start().await else { return };
    let w = World::with_commit();
    w.user_file(&format!("[docker]\nhost = {:?}\n", daemon.host()));
    let docker = ["--provider", "docker", "--image", IMAGE, "--network", "none"];
    let create: Vec<&str> = ["sandbox", "create", "--name", "box1"].into_iter().chain(docker).collect();
    let ran = w.run(&create);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let age = || {
        for used in std::fs::read_dir(w.home().join("docker/images")).unwrap().flatten() {
            let long_ago = SystemTime::now() - Duration::from_secs(25 * 3600);
            std::fs::File::options().write(true).open(used.path()).unwrap().set_modified(long_ago).unwrap();
        }
    };
    age();
    assert_eq!(announced_and_done(&w)["images"], serde_json::json!([]), "a sandbox stands on it");
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
    age();
    let done = announced_and_done(&w);
    let images = done["images"].as_array().unwrap();
    assert_eq!(images.len(), 1, "{done}");
    assert!(images[0].as_str().unwrap().starts_with("forkyard-prepared:"), "{done}");
    assert_eq!(announced_and_done(&w)["images"], serde_json::json!([]));
}
