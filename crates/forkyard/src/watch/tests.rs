//! The screen as it looks, and what keys do, without a terminal.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use forkyard_agent::event::{ChangeType, FileEdited, ToolUse};
use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::Timestamp;
use forkyard_core::view::{ForkOutcome, Lifecycle, RunOutcome, RunStatus};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color as Paint;

use super::model::{Mode, Pane, Screen, Wish};
use super::view::draw;
use crate::render::fixture::{board, fork};

fn entry(at: u64, event: AgentEvent) -> JournalEntry {
    JournalEntry { at: Timestamp(at * 1000), subagent: None, event }
}

fn call(at: u64, command: &str) -> JournalEntry {
    let input = serde_json::json!({ "command": command });
    let (tool, tool_use_id) = ("Bash".to_string(), format!("t{at}"));
    entry(at, AgentEvent::ToolUse(ToolUse { turn: 1, tool, tool_use_id, input, rewritten: None, plan: None }))
}

fn edited(at: u64, path: &str, diff: &str) -> JournalEntry {
    entry(
        at,
        AgentEvent::FileEdited(FileEdited {
            turn: 1,
            tool_use_id: format!("t{at}"),
            file_path: path.into(),
            change_type: ChangeType::Modified,
            lines_added: 1,
            lines_removed: 1,
            diff_preview: diff.into(),
            full_diff: Some(diff.into()),
            full_diff_available: true,
            full_diff_size: diff.len() as u64,
        }),
    )
}

const EDIT: &str = "--- a/src/lib.rs\n+++ b/src/lib.rs\n@@ -1 +1 @@\n-\tlet old = 1;\n+\tlet new = 2;\n";

/// Four forks in four states, the first with something to read.
fn screen() -> Screen {
    let mut b = board(vec![
        fork(0, Lifecycle::Running, None),
        fork(1, Lifecycle::Completed, Some(ForkOutcome::Success)),
        fork(2, Lifecycle::Pending, None),
        fork(3, Lifecycle::Failed, Some(ForkOutcome::Failed)),
    ]);
    b.forks[1].verified = Some(true);
    b.forks[3].error = Some("the agent reached its limit of 100 turns".into());
    b.run.prompt = "Make the tests pass.\nAnd be quick about it.".into();
    b.doing.insert(0, "Bash cargo test".into());
    let mut s = Screen::new(b, None);
    s.record(0, &call(1, "ls"));
    s.record(0, &edited(2, "src/lib.rs", EDIT));
    let long =
        "The loop ends one step early, because the bound is not part of the range; I make it inclusive.";
    s.record(0, &entry(3, AgentEvent::Error { turn: 1, error: long.into() }));
    s.record(0, &call(4, "cargo test --workspace"));
    s
}

fn picture(screen: &Screen, columns: u16, rows: u16, color: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|f| draw(screen, f, color)).unwrap();
    terminal
}

fn shown(screen: &Screen, columns: u16, rows: u16) -> String {
    picture(screen, columns, rows, true).backend().to_string()
}

fn press(screen: &mut Screen, keys: &str) -> Option<Wish> {
    let mut last = None;
    for c in keys.chars() {
        let code = match c {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\x1b' => KeyCode::Esc,
            '\x08' => KeyCode::Backspace,
            '↓' => KeyCode::Down,
            '↑' => KeyCode::Up,
            '⇞' => KeyCode::PageUp,
            '⇟' => KeyCode::PageDown,
            c => KeyCode::Char(c),
        };
        last = screen.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
    last
}

#[test]
fn wide() {
    insta::assert_snapshot!(shown(&screen(), 90, 24));
}

#[test]
fn narrow_and_low() {
    insta::assert_snapshot!(shown(&screen(), 34, 14));
}

#[test]
fn the_diff_of_a_fork_that_works() {
    let mut s = screen();
    press(&mut s, "\t");
    insta::assert_snapshot!(shown(&s, 70, 18));
}

#[test]
fn writing_to_a_fork() {
    let mut s = screen();
    press(&mut s, "mUse the standard library");
    insta::assert_snapshot!(shown(&s, 70, 12));
}

#[test]
fn asked_whether_to_cancel() {
    let mut s = screen();
    press(&mut s, "c");
    insta::assert_snapshot!(shown(&s, 100, 12));
}

#[test]
fn help() {
    let mut s = screen();
    press(&mut s, "?");
    insta::assert_snapshot!(shown(&s, 90, 18));
}

#[test]
fn a_hundred_forks_and_one_of_them_chosen() {
    let forks = (0..100).map(|n| fork(n, Lifecycle::Running, None)).collect();
    let mut s = Screen::new(board(forks), Some(57));
    s.idle = true;
    insta::assert_snapshot!(shown(&s, 70, 16));
}

#[test]
fn an_ended_run() {
    let mut s = screen();
    for f in &mut s.board.forks {
        f.outcome = Some(f.outcome.unwrap_or(ForkOutcome::Cancelled));
    }
    s.board.run.status = RunStatus::Ended;
    s.board.run.outcome = Some(RunOutcome::Success);
    s.board.run.winner = Some(1);
    insta::assert_snapshot!(shown(&s, 90, 14));
}

/// Every size, every mode: nothing panics.
#[test]
fn no_terminal_is_too_small() {
    let mut s = screen();
    for keys in ["", "\t", "?", "m日本語日本語日本語", "\x1bc", "a12", "\x1bz"] {
        press(&mut s, keys);
        for columns in 0..40 {
            for rows in 0..20 {
                picture(&s, columns, rows, true);
            }
        }
    }
}

#[test]
fn hostile_text_is_spelt_out() {
    let mut s = screen();
    let evil = "\x1b[2J\x1b]0;t\x07\u{202e}abc\r\u{200b}\u{9b}31m";
    s.board.run.prompt = evil.into();
    s.board.forks[0].name = Some(evil.into());
    s.board.doing.insert(0, evil.into());
    s.record(0, &call(5, evil));
    s.record(0, &edited(6, evil, evil));
    s.result(3, Err(evil.into()));
    s.say(evil, true);
    s.result(1, Ok(format!("+{evil}\n")));
    let steers = |c: char| (c.is_control() && c != '\n') || matches!(c, '\u{202e}' | '\u{200b}');
    for keys in ["", "\t", "↓", "↓↓", "\x1bm"] {
        press(&mut s, keys);
        let text = shown(&s, 120, 30);
        assert!(!text.contains(steers), "{text:?}");
    }
    s.paste(evil);
    assert!(!shown(&s, 120, 30).contains(steers));
}

#[test]
fn without_colour_there_is_none() {
    let s = screen();
    let colored = |color| {
        let terminal = picture(&s, 90, 24, color);
        let buffer = terminal.backend().buffer().clone();
        buffer.content.iter().any(|c| c.fg != Paint::Reset || c.bg != Paint::Reset)
    };
    assert!(colored(true) && !colored(false));
}

#[test]
fn keys_become_wishes() {
    let mut s = screen();
    assert_eq!(press(&mut s, "p"), Some(Wish::Pause));
    s.board.run.paused = true;
    assert_eq!(press(&mut s, "p"), Some(Wish::Resume));
    let message = |to, text: &str, interrupt| Some(Wish::Message { to, text: text.into(), interrupt });
    assert_eq!(press(&mut s, "mhi q?\x08\n"), message(Some(0), "hi q", false));
    assert_eq!(press(&mut s, "istop\n"), message(Some(0), "stop", true));
    assert_eq!(press(&mut s, "Mall\n"), message(None, "all", false));
    // Nothing is sent by mistake.
    assert_eq!(press(&mut s, "m \n"), None);
    assert_eq!(press(&mut s, "mx\x1b"), None);
    assert_eq!(s.mode, Mode::Look);
    assert_eq!(press(&mut s, "cn"), None);
    assert_eq!(press(&mut s, "cy"), Some(Wish::Cancel(Some(0))));
    assert_eq!(press(&mut s, "C\n"), None);
    assert_eq!(press(&mut s, "Cy"), Some(Wish::Cancel(None)));
    assert_eq!(press(&mut s, "a\n"), Some(Wish::Add(1)));
    assert_eq!(press(&mut s, "a\x0812x\n"), Some(Wish::Add(12)));
    assert_eq!(press(&mut s, "a00\n"), None, "{:?}", s.notice);
    assert!(s.notice.as_ref().unwrap().bad);
    assert_eq!(press(&mut s, "q"), Some(Wish::Quit));
    let ctrl = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
    press(&mut s, "mx");
    assert_eq!(s.key(ctrl('c')), Some(Wish::Quit));
    assert_eq!(s.key(ctrl('z')), Some(Wish::Suspend));
}

#[test]
fn what_has_ended_is_not_talked_to() {
    let mut s = screen();
    press(&mut s, "↓");
    for keys in ["m", "c", "i"] {
        assert_eq!(press(&mut s, keys), None);
        assert_eq!((&s.mode, s.notice.as_ref().unwrap().text.as_str()), (&Mode::Look, "Fork 1 has ended."));
    }
    s.board.run.status = RunStatus::Ended;
    for keys in ["p", "a", "M", "C"] {
        assert_eq!(press(&mut s, keys), None);
        assert_eq!(s.notice.as_ref().unwrap().text, "The run has ended.");
    }
}

#[test]
fn the_result_is_asked_for_once_and_replaces_the_edits() {
    let mut s = screen();
    press(&mut s, "\t");
    assert_eq!((s.pane, s.needs()), (Pane::Diff, None), "a fork that works has no result");
    press(&mut s, "↓");
    assert_eq!((s.needs(), s.needs()), (Some(Wish::Diff(1)), None));
    s.result(1, Ok("diff --git a/x b/x\n+new\n".into()));
    assert!(shown(&s, 70, 18).contains("+new"));
    press(&mut s, "↓↓");
    assert_eq!(s.needs(), Some(Wish::Diff(3)));
    s.result(3, Err("fork 3 left no result".into()));
    assert!(shown(&s, 70, 18).contains("left no result"));
}

#[test]
fn a_feed_that_was_scrolled_back_stays_where_it_is() {
    let mut s = screen();
    for n in 0..100 {
        s.record(0, &call(10 + n, &format!("echo {n}")));
    }
    assert!(shown(&s, 70, 20).contains("echo 99"));
    press(&mut s, "⇞⇞");
    let before = shown(&s, 70, 20);
    assert!(before.contains("echo 79") && !before.contains("echo 80"), "{before}");
    s.record(0, &call(200, "echo new"));
    let after = shown(&s, 70, 20);
    assert!(
        after.contains("echo 79") && !after.contains("echo 80") && after.contains("21 lines below"),
        "{after}"
    );
    press(&mut s, "G");
    assert!(shown(&s, 70, 20).contains("echo new"));
    // Above the first line there is nothing, and below the last one neither.
    press(&mut s, "g⇞");
    assert!(shown(&s, 70, 20).contains("Bash ls"));
    press(&mut s, "\tG⇟");
    assert!(shown(&s, 70, 20).contains("let new = 2"));
}

#[test]
fn a_notice_goes_with_time() {
    let mut s = screen();
    s.say("Sent.", false);
    assert!(shown(&s, 70, 20).contains("Sent."));
    s.tick(Timestamp(s.board.now.0 + 60_000));
    assert!(!shown(&s, 70, 20).contains("Sent."));
}
