//! What is on the screen, without a terminal: keys and news go in, wishes come out.

use std::collections::BTreeMap;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::spec::MAX_FORKS;
use forkyard_core::view::{ForkView, RunStatus};
use forkyard_core::{ForkNum, Millis, Timestamp};

use super::edit::Line;
use super::rows::{Row, Rows};
use crate::render::session::{self, clock, diff_color};
use crate::render::{Board, Color, plain_block};

/// How long a notice stands in place of the keys.
const NOTICE: Millis = Millis::secs(6);
/// Rows that one press of a page key goes.
const PAGE: usize = 10;

/// What the user wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    Quit,
    /// Ctrl-Z: back to the shell until it says `fg`.
    Suspend,
    Message {
        to: Option<ForkNum>,
        text: String,
        interrupt: bool,
    },
    Pause,
    Resume,
    /// One fork, or the run.
    Cancel(Option<ForkNum>),
    Add(u32),
    /// The result of a fork that has ended.
    Diff(ForkNum),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pane {
    Feed,
    Diff,
}

/// What keys mean at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    Look,
    Help,
    Message {
        to: Option<ForkNum>,
        interrupt: bool,
        line: Line,
    },
    Add {
        line: Line,
    },
    /// One fork, or the run.
    Cancel(Option<ForkNum>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Patch {
    /// Nobody asked for it yet.
    Unasked,
    Asked,
    Here(Rows),
    /// There is none, and why.
    Missing(String),
}

/// One fork's panes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub feed: Rows,
    /// What the agent's tools changed so far, in their order.
    pub edits: Rows,
    pub result: Patch,
    /// The feed's row after the last one on the screen; None: it follows the end.
    pub feed_end: Option<usize>,
    /// The diff's first row on the screen.
    pub diff_top: usize,
}

impl Default for Session {
    fn default() -> Session {
        Session {
            feed: Rows::default(),
            edits: Rows::default(),
            result: Patch::Unasked,
            feed_end: None,
            diff_top: 0,
        }
    }
}

impl Session {
    /// The result once it is known, and until then the edits so far.
    pub fn diff(&self) -> &Rows {
        match &self.result {
            Patch::Here(rows) => rows,
            Patch::Unasked | Patch::Asked | Patch::Missing(_) => &self.edits,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub text: String,
    pub bad: bool,
    until: Timestamp,
}

#[derive(Debug, Clone)]
pub struct Screen {
    pub board: Board,
    /// A run that waits to be driven, and nobody does.
    pub idle: bool,
    pub chosen: ForkNum,
    pub pane: Pane,
    /// The pane has the whole screen.
    pub zoomed: bool,
    pub mode: Mode,
    pub notice: Option<Notice>,
    sessions: BTreeMap<ForkNum, Session>,
}

impl Screen {
    pub fn new(board: Board, chosen: Option<ForkNum>) -> Screen {
        let first = board.forks.first().map_or(0, |f| f.fork);
        Screen {
            board,
            idle: false,
            chosen: chosen.unwrap_or(first),
            pane: Pane::Feed,
            zoomed: false,
            mode: Mode::Look,
            notice: None,
            sessions: BTreeMap::new(),
        }
    }

    pub fn fork(&self) -> Option<&ForkView> {
        self.board.forks.iter().find(|f| f.fork == self.chosen)
    }
    pub fn session(&self) -> Option<&Session> {
        self.sessions.get(&self.chosen)
    }
    fn session_mut(&mut self) -> &mut Session {
        self.sessions.entry(self.chosen).or_default()
    }
    pub fn ended(&self) -> bool {
        self.board.run.status == RunStatus::Ended
    }
    /// What the run needs before anything goes on.
    pub fn stands_still(&self) -> bool {
        let run = &self.board.run;
        !self.ended() && (run.paused || run.detached || self.idle)
    }

    /// What the store says now.
    pub fn look(&mut self, board: Board) {
        self.board = board;
        self.tick(self.board.now);
    }

    /// Time goes on.
    pub fn tick(&mut self, now: Timestamp) {
        self.board.now = now;
        if self.notice.as_ref().is_some_and(|n| n.until <= now) {
            self.notice = None;
        }
    }

    /// An agent recorded something.
    pub fn record(&mut self, fork: ForkNum, entry: &JournalEntry) {
        let session = self.sessions.entry(fork).or_default();
        for line in session::parts(entry) {
            let indent = if line.nested { "  " } else { "" };
            session.feed.push(Row {
                mark: format!("{} {indent}{} ", clock(line.at), line.mark),
                mark_color: line.color,
                text: line.text,
                text_color: line.text_color,
            });
        }
        if let AgentEvent::FileEdited(e) = &entry.event {
            let diff = e.full_diff.as_ref().unwrap_or(&e.diff_preview);
            diff_rows(&mut session.edits, diff);
        }
    }

    /// The result of a fork, or why there is none.
    pub fn result(&mut self, fork: ForkNum, patch: Result<String, String>) {
        let session = self.sessions.entry(fork).or_default();
        session.result = match patch {
            Ok(patch) => {
                let mut rows = Rows::default();
                diff_rows(&mut rows, &patch);
                session.diff_top = 0;
                Patch::Here(rows)
            }
            Err(why) => Patch::Missing(why),
        };
    }

    pub fn say(&mut self, text: impl Into<String>, bad: bool) {
        self.notice = Some(Notice { text: text.into(), bad, until: self.board.now + NOTICE });
    }

    /// What the screen itself needs: the result of the fork whose diff is looked at, once there can be one.
    pub fn needs(&mut self) -> Option<Wish> {
        let ended = self.fork().is_some_and(|f| f.outcome.is_some());
        if self.pane != Pane::Diff || !ended || self.session_mut().result != Patch::Unasked {
            return None;
        }
        self.session_mut().result = Patch::Asked;
        Some(Wish::Diff(self.chosen))
    }

    pub fn paste(&mut self, text: &str) {
        match &mut self.mode {
            Mode::Message { line, .. } => line.insert(text),
            Mode::Add { .. } | Mode::Look | Mode::Help | Mode::Cancel(_) => {}
        }
    }

    pub fn key(&mut self, key: KeyEvent) -> Option<Wish> {
        let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if ctrl => return Some(Wish::Quit),
            KeyCode::Char('z') if ctrl => return Some(Wish::Suspend),
            _ => {}
        }
        self.notice = None;
        match std::mem::replace(&mut self.mode, Mode::Look) {
            Mode::Look => self.look_key(key, ctrl),
            // Any key.
            Mode::Help => None,
            Mode::Cancel(what) => matches!(key.code, KeyCode::Char('y' | 'Y')).then_some(Wish::Cancel(what)),
            Mode::Message { to, interrupt, mut line } => match (key.code, typed(&mut line, key, ctrl)) {
                (KeyCode::Enter, _) if line.text().trim().is_empty() => None,
                (KeyCode::Enter, _) => Some(Wish::Message { to, text: line.text(), interrupt }),
                (KeyCode::Esc, _) => None,
                (_, ()) => {
                    self.mode = Mode::Message { to, interrupt, line };
                    None
                }
            },
            Mode::Add { mut line } => match key.code {
                KeyCode::Enter => self.add(&line.text()),
                KeyCode::Esc => None,
                KeyCode::Char(c) if !c.is_ascii_digit() && !ctrl => {
                    self.mode = Mode::Add { line };
                    None
                }
                _ => {
                    typed(&mut line, key, ctrl);
                    self.mode = Mode::Add { line };
                    None
                }
            },
        }
    }

    fn add(&mut self, text: &str) -> Option<Wish> {
        let room = (MAX_FORKS as usize).saturating_sub(self.board.forks.len());
        match text.parse::<u32>() {
            Ok(n) if n > 0 && n as usize <= room => Some(Wish::Add(n)),
            _ if room == 0 => {
                self.say(format!("A run has at most {MAX_FORKS} forks."), true);
                None
            }
            _ => {
                self.say(format!("Write a number from 1 to {room}."), true);
                None
            }
        }
    }

    fn look_key(&mut self, key: KeyEvent, ctrl: bool) -> Option<Wish> {
        let live = self.fork().is_some_and(|f| f.outcome.is_none());
        match key.code {
            KeyCode::Char('d') if ctrl => self.scroll(PAGE as isize),
            KeyCode::Char('u') if ctrl => self.scroll(-(PAGE as isize)),
            KeyCode::PageDown | KeyCode::Char(' ') => self.scroll(PAGE as isize),
            KeyCode::PageUp | KeyCode::Char('b') => self.scroll(-(PAGE as isize)),
            KeyCode::Char('J') => self.scroll(1),
            KeyCode::Char('K') => self.scroll(-1),
            KeyCode::Home | KeyCode::Char('g') => self.scroll(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.scroll(isize::MAX),
            KeyCode::Up | KeyCode::Char('k') => self.choose(-1),
            KeyCode::Down | KeyCode::Char('j') => self.choose(1),
            KeyCode::Tab | KeyCode::BackTab | KeyCode::Left | KeyCode::Right | KeyCode::Char('d') => {
                self.pane = match self.pane {
                    Pane::Feed => Pane::Diff,
                    Pane::Diff => Pane::Feed,
                };
            }
            KeyCode::Enter | KeyCode::Char('z') => self.zoomed = !self.zoomed,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char('q') => return Some(Wish::Quit),
            KeyCode::Esc if self.zoomed => self.zoomed = false,
            KeyCode::Char('m' | 'i' | 'M' | 'p' | 'c' | 'C' | 'a') if self.ended() => {
                self.say("The run has ended.", true);
            }
            KeyCode::Char('m' | 'i' | 'c') if !live => {
                self.say(format!("Fork {} has ended.", self.chosen), true);
            }
            KeyCode::Char(c @ ('m' | 'i')) => {
                let (to, line) = (Some(self.chosen), Line::default());
                self.mode = Mode::Message { to, interrupt: c == 'i', line };
            }
            KeyCode::Char('M') => {
                self.mode = Mode::Message { to: None, interrupt: false, line: Line::default() };
            }
            KeyCode::Char('p') => {
                return Some(if self.stands_still() { Wish::Resume } else { Wish::Pause });
            }
            KeyCode::Char('c') => self.mode = Mode::Cancel(Some(self.chosen)),
            KeyCode::Char('C') => self.mode = Mode::Cancel(None),
            KeyCode::Char('a') => self.mode = Mode::Add { line: Line::new("1") },
            _ => {}
        }
        None
    }

    fn choose(&mut self, step: isize) {
        let at = self.board.forks.iter().position(|f| f.fork == self.chosen).unwrap_or(0);
        let to = at.saturating_add_signed(step).min(self.board.forks.len().saturating_sub(1));
        if let Some(f) = self.board.forks.get(to) {
            self.chosen = f.fork;
        }
    }

    fn scroll(&mut self, step: isize) {
        let pane = self.pane;
        let s = self.session_mut();
        match pane {
            Pane::Feed => {
                let (first, end) = (s.feed.first() + 1, s.feed.end());
                let to = s.feed_end.unwrap_or(end).saturating_add_signed(step).max(first);
                s.feed_end = (to < end).then_some(to);
            }
            Pane::Diff => {
                let (first, end) = (s.diff().first(), s.diff().end());
                let to = s.diff_top.saturating_add_signed(step);
                s.diff_top = to.clamp(first, end.saturating_sub(1).max(first));
            }
        }
    }
}

fn diff_rows(rows: &mut Rows, diff: &str) {
    for line in diff.lines() {
        let text = plain_block(line);
        rows.push(Row { mark: String::new(), mark_color: Color::Dim, text_color: diff_color(line), text });
    }
}

/// What every line of text understands.
fn typed(line: &mut Line, key: KeyEvent, ctrl: bool) {
    match key.code {
        KeyCode::Char('u') if ctrl => line.clear(),
        KeyCode::Char('w') if ctrl => line.delete_word(),
        KeyCode::Char('a') if ctrl => line.home(),
        KeyCode::Char('e') if ctrl => line.end(),
        KeyCode::Char(_) if ctrl => {}
        KeyCode::Char(c) => line.insert(c.encode_utf8(&mut [0; 4])),
        KeyCode::Backspace => line.backspace(),
        KeyCode::Delete => line.delete(),
        KeyCode::Left => line.left(),
        KeyCode::Right => line.right(),
        KeyCode::Home => line.home(),
        KeyCode::End => line.end(),
        _ => {}
    }
}
