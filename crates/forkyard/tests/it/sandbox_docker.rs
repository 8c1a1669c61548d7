//! The same of containers.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use super::docker_fixture::{Daemon, IMAGE};
use super::{World, sandbox, sandbox_shell};

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_of_docker_behave_as_local_ones() {
    let Some(daemon) = Daemon::start().await else { return };
    let w = World::new();
    w.user_file(&format!("[docker]\nhost = {:?}\n", daemon.host()));
    let make = ["--provider", "docker", "--image", IMAGE, "--network", "none"];
    let with = |head: &[&'static str], tail: &[&'static str]| -> Vec<&'static str> {
        head.iter().chain(&make).chain(tail).copied().collect()
    };

    // Input, output, and a reader that goes away.
    let mut child = w
        .program(&with(&["sandbox", "run"], &["cat"]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"piped\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"piped\n");
    let mut child = w.program(&with(&["sandbox", "run"], &["yes"])).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(141));

    // Attacks start from the image that is named; what nothing stops there is said, and is no breach.
    let attack = ["doctor", "--attack", "--only", "3,9,16,22", "--json"];
    let said = w.run(&[&attack[..], &make[..4]].concat());
    assert_eq!(said.code, 0, "{}{}", said.stdout, said.stderr);
    let said: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    let outcomes: Vec<_> = said["attempts"].as_array().unwrap().iter().map(|a| &a["outcome"]).collect();
    assert!(outcomes.len() >= 5 && outcomes.iter().all(|o| *o != "breach" && *o != "not_tried"), "{said}");
    assert!(outcomes.iter().any(|o| *o == "open"), "{said}");

    // One that was killed leaves nothing to the next command.
    let script = ["--", "sh", "-c", "echo up; exec sleep 600"];
    let mut child = w.program(&with(&["sandbox", "run"], &script)).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let there = || daemon.docker().unwrap();
    let all = bollard::query_parameters::ListContainersOptionsBuilder::default().all(true).build();
    assert_eq!(there().list_containers(Some(all.clone())).await.unwrap().len(), 1);
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
    assert_eq!(there().list_containers(Some(all)).await.unwrap().len(), 0);

    // A child is like its parent, and a name means one sandbox.
    let ran = w.run(&with(&["sandbox", "create", "--name", "box1", "--env", "GREETING=hello"], &[]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = w.run(&["sandbox", "fork", "box1"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let child = ran.stdout.trim();
    let script = "echo $GREETING; env | grep -i proxy | sort; \
                  wget -q -T 5 -O - http://crates.io/ >/dev/null 2>&1 && echo reached; true";
    let inside = |id: &str| w.run(&["sandbox", "exec", id, "--", "sh", "-c", script]).stdout;
    let said = inside(child);
    assert_eq!(said, inside("box1"));
    assert!(said.starts_with("hello\n") && !said.contains("reached"), "{said}");
    let ran = w.run(&["sandbox", "create", "--name", "box1", "--network", "none"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    let ran = w.run(&["sandbox", "rm", "--all", "--yes"]);
    assert_eq!((ran.code, ran.stdout.lines().count()), (0, 2), "{}", ran.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_of_docker_lives_on_from_command_to_command() {
    let Some(daemon) = Daemon::start().await else { return };
    let w = World::new();
    w.user_file(&format!("[docker]\nhost = {:?}\n", daemon.host()));
    let (provider, image) = (["--provider", "docker"], ["--image", IMAGE]);
    sandbox::lives_on(&w, &provider, &image);
    let create = ["sandbox", "create", "--network", "none", "--name", "box2"];
    let ran = w.run(&[&create[..], &provider, &image].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    sandbox_shell::is_a_terminals(&w, "box2");
    assert_eq!(w.run(&["sandbox", "rm", "box2"]).code, 0);
}
