//! The program on a real pseudo-terminal, and what a person would see there.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use super::World;

/// A loaded machine takes its time; a hang is found all the same.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Terminal {
    child: Child,
    keys: File,
    /// The side that the program has: its modes are what a shell would find afterwards.
    user: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    pub fn start(w: &World, args: &[&str], size: (u16, u16)) -> Terminal {
        Terminal::run(w.program(args), size)
    }

    pub fn run(mut command: Command, (columns, rows): (u16, u16)) -> Terminal {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&control).unwrap();
        unlockpt(&control).unwrap();
        let name = ptsname(&control, Vec::new()).unwrap();
        let user = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        tcsetwinsize(&user, size(columns, rows)).unwrap();
        let end = || Stdio::from(user.as_fd().try_clone_to_owned().unwrap());
        command.env("TERM", "xterm-256color").stdin(end()).stdout(end()).stderr(end());
        // SAFETY: both are system calls alone, which may be made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(std::io::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(some(rows), some(columns), 0)));
        let keys = File::from(control.try_clone().unwrap());
        let (mut from, to) = (File::from(control), screen.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Ends with an error when nobody has the other side any more.
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                to.lock().unwrap().process(&bytes[..n]);
            }
        });
        Terminal { child, keys, user, screen }
    }

    pub fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    pub fn wait_for(&self, what: &str) -> String {
        self.wait_until(what, |text| text.contains(what))
    }

    pub fn wait_until(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        let since = Instant::now();
        loop {
            let text = self.text();
            if is(&text) {
                return text;
            }
            assert!(since.elapsed() < PATIENCE, "no {what:?} on:\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(some(rows), some(columns));
        tcsetwinsize(&self.user, size(columns, rows)).unwrap();
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn end(&mut self) -> ExitStatus {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(since.elapsed() < PATIENCE, "it does not end:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether a shell would find the terminal as it was.
    pub fn is_as_before(&self) -> bool {
        let lines =
            tcgetattr(&self.user).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO);
        let parser = self.screen.lock().unwrap();
        lines
            && !parser.screen().alternate_screen()
            && !parser.screen().hide_cursor()
            && !parser.screen().bracketed_paste()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

fn some(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).unwrap()
}
