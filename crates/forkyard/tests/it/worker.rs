use std::process::Stdio;

use super::World;

#[test]
fn a_worker_takes_what_nobody_drives_and_ends_when_it_is_told() {
    let w = World::with_commit();
    let mut worker = w.program(&["worker"]).stdout(Stdio::piped()).spawn().unwrap();
    // It has said that it works; the store knows of it a moment later, and a run that is early gets a worker of its own.
    let mut said = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(worker.stdout.take().unwrap()), &mut said)
        .unwrap();
    assert!(said.starts_with("Driving runs"), "{said}");
    let ran = w.fork(&["--no-wait", "--json"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let run = json["run"].as_str().unwrap();
    assert_eq!(w.run(&["logs", "-f", run]).code, 0);
    assert_eq!(w.json(&["status", run, "--json"])["outcome"], "success");
    let pid = rustix::process::Pid::from_child(&worker);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(worker.wait().unwrap().success());
}
