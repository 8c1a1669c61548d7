use rustix::process::Signal;

use super::World;
use super::terminal::Terminal;

#[test]
fn a_run_is_watched_steered_and_left() {
    let w = World::with_commit();
    let run = w.started();
    let mut t = Terminal::start(&w, &["watch"], (90, 24));
    t.wait_for("I wait.");
    t.wait_for("Bash while ! [ -e go ]");
    t.press("mhurry up\r");
    t.wait_for("Sent to fork 0");
    t.press("a\r");
    t.wait_for("0/3 forks");
    t.press("p");
    t.wait_for("paused");
    t.press("p");
    t.wait_until("running", |text| !text.contains("paused"));
    t.press("j");
    t.wait_for(&format!("{run}/1 Feed Diff"));
    t.press("c");
    t.wait_for("Cancel fork 1?");
    t.press("y");
    t.wait_for("1/3 forks");
    t.resize(40, 10);
    t.wait_until("the narrow picture", |text| text.contains("q leave") && !text.contains("z zoom"));
    t.press("Cy");
    t.wait_for("cancelled  3/3");
    t.press("q");
    assert!(t.end().success());
    // On the terminal itself, what came of it.
    t.wait_for("0 of 3 forks succeeded");
    assert!(t.is_as_before());
}

#[test]
fn the_terminal_is_given_back_whatever_ends_it() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    for end in ["q", "\x03", "TERM", "HUP", "INT"] {
        let mut t = Terminal::start(&w, &["watch", &format!("{run}/1")], (80, 20));
        t.wait_for("I add two.");
        assert!(!t.is_as_before());
        match end {
            "TERM" => t.signal(Signal::TERM),
            "HUP" => t.signal(Signal::HUP),
            "INT" => t.signal(Signal::INT),
            keys => t.press(keys),
        }
        assert!(t.end().success(), "{end}");
        t.wait_for("2 of 2 forks succeeded");
        assert!(t.is_as_before(), "{end}");
    }
}

#[test]
#[ignore = "the child of the test below"]
fn panics_on_the_full_screen() {
    let _screen = forkyard::program::FullScreen::take().unwrap();
    panic!("as it must");
}

#[test]
fn a_panic_gives_the_terminal_back_and_is_seen() {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "watch::panics_on_the_full_screen", "--ignored", "--nocapture"]);
    // A trace would push the message off the screen.
    child.env("RUST_BACKTRACE", "0");
    let mut t = Terminal::run(child, (80, 40));
    assert!(!t.end().success());
    t.wait_for("as it must");
    assert!(t.is_as_before());
}

#[test]
fn the_diff_of_a_result() {
    let w = World::with_commit();
    let run = w.ended(&["-f", "2"]);
    let mut t = Terminal::start(&w, &["watch", &run], (80, 20));
    t.wait_for("I add zero.");
    // The model's words steer no terminal.
    t.wait_for("Done \\x1b[2Jand well.");
    t.press("\t");
    t.wait_for("+zero");
    t.press("j");
    t.wait_for("+two");
}

#[test]
fn a_pipe_is_told_what_to_use_instead() {
    let w = World::with_commit();
    let ran = w.run(&["watch", "r1"]);
    assert_eq!(ran.code, 2);
    insta::assert_snapshot!(ran.stderr, @r"
    error: watch needs a terminal
    hint: `forkyard logs -f RUN` follows a run in a pipe, `forkyard events -f --json RUN` for a program
    ");
    let mut t = Terminal::start(&w, &["watch"], (80, 20));
    assert_eq!(t.end().code(), Some(2));
    t.wait_for("there is no run yet");
}
