use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::World;

#[test]
fn cleanup_leaves_what_no_run_has_made() {
    let w = World::with_commit();
    w.ended(&[]);
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "mine"]).code, 0);
    assert_eq!(w.run(&["cleanup", "--once", "--max-age", "0s"]).stdout, "0 orphaned sandboxes removed.\n");
    assert_eq!(w.run(&["cleanup", "--dry-run"]).stdout, "0 orphaned sandboxes.\n");
    assert!(w.run(&["sandbox", "list"]).stdout.contains("mine"));
    assert_eq!(w.json(&["stop-cleanup", "--json"])["stats"]["running"], false);
    assert_eq!(w.run(&["sandbox", "rm", "mine"]).code, 0);
}

#[test]
fn it_goes_on_until_another_process_stops_it() {
    let w = World::with_commit();
    for by_signal in [false, true] {
        let mut cleanup = w.program(&["cleanup", "--interval", "1s"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(cleanup.stdout.take().unwrap()).lines();
        assert!(said.next().unwrap().unwrap().starts_with("Looking for orphaned sandboxes"));
        let since = std::time::Instant::now();
        while w.json(&["list", "--json"])["runs"].is_null() && since.elapsed().as_secs() < 60 {}
        if by_signal {
            let pid = rustix::process::Pid::from_child(&cleanup);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        } else {
            assert_eq!(w.run(&["stop-cleanup"]).code, 0);
        }
        assert!(cleanup.wait().unwrap().success(), "by a signal: {by_signal}");
        assert!(said.next().unwrap().unwrap().contains("sandboxes removed so far"));
    }
}
