//! The terminal while the full screen has it, and how it gets back what it had: at the end, on a panic, on a signal.

use std::io::{self, Stdout, stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::event::{DisableBracketedPaste, EnableBracketedPaste};
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::Frame;
use ratatui::backend::CrosstermBackend;
use rustix::process::{Signal, getpid, kill_process};

/// Whether this process has the terminal to itself. A panic may come from any thread.
static TAKEN: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

pub struct Terminal(ratatui::Terminal<CrosstermBackend<Stdout>>);

impl Terminal {
    pub fn take() -> io::Result<Terminal> {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // First, so that what the panic says is seen.
                give_back();
                before(panic);
            }));
        });
        enter()?;
        let made = ratatui::Terminal::new(CrosstermBackend::new(stdout()));
        if made.is_err() {
            give_back();
        }
        Ok(Terminal(made?))
    }

    pub fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.0.draw(picture)?;
        Ok(())
    }

    /// Back to the shell, as ctrl-Z does, until it continues this process.
    pub fn suspend(&mut self) -> io::Result<()> {
        give_back();
        kill_process(getpid(), Signal::TSTP)?;
        enter()?;
        self.0.clear()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        give_back();
    }
}

fn enter() -> io::Result<()> {
    enable_raw_mode()?;
    TAKEN.store(true, Ordering::SeqCst);
    execute!(stdout(), EnterAlternateScreen, EnableBracketedPaste).inspect_err(|_| give_back())
}

/// Once for each time that it was taken. A terminal that is gone needs nothing back.
fn give_back() {
    if TAKEN.swap(false, Ordering::SeqCst) {
        let _ = execute!(stdout(), DisableBracketedPaste, LeaveAlternateScreen, crossterm::cursor::Show);
        let _ = disable_raw_mode();
    }
}
