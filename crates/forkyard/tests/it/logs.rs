use super::World;

#[test]
fn a_session_is_told_by_fork_or_all_together() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let one = format!("{run}/1");
    let log = w.run(&["logs", &one]).stdout;
    assert!(log.contains("I add two.") && log.contains("$ Write a.txt"), "{log}");
    // Whatever an agent says, it steers no terminal.
    assert!(log.contains("Done \\x1b[2Jand well.") && !log.contains('\x1b'), "{log}");
    let all = w.run(&["logs", &run]).stdout;
    assert!(
        all.lines().any(|l| l.starts_with("[0] ")) && all.lines().any(|l| l.starts_with("[1] ")),
        "{all}"
    );
    let tail = w.run(&["logs", &one, "-n", "2"]).stdout;
    assert_eq!(
        tail.lines().collect::<Vec<_>>(),
        log.lines().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>()
    );
}

#[test]
fn followed_it_ends_with_the_run() {
    let w = World::with_commit();
    let run = w.started();
    let mut logs = w.program(&["logs", "-f", &run]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(logs.stdout.take().unwrap()));
    assert!(lines.by_ref().any(|l| l.unwrap().contains("I wait.")));
    assert_eq!(w.run(&["cancel", &run]).code, 0);
    assert!(lines.by_ref().any(|l| l.unwrap().contains("stopped")));
    lines.for_each(drop);
    assert!(logs.wait().unwrap().success());
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    let mut logs = w.program(&["logs", &run]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(logs.stdout.take());
    assert!(logs.wait().unwrap().success());
}
