//! stdio on one side, the guest's socket on the other.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

/// Ends when either side ends.
pub fn run(socket: &str) -> ExitCode {
    let stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(e) => {
            eprintln!("forkyard-guest: no guest at {socket}: {e}");
            return ExitCode::FAILURE;
        }
    };
    let Ok(mut up) = stream.try_clone() else { return ExitCode::FAILURE };
    std::thread::spawn(move || {
        let _ = copy(&mut std::io::stdin().lock(), &mut up);
        let _ = up.shutdown(std::net::Shutdown::Write);
    });
    let mut down = stream;
    match copy(&mut down, &mut std::io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Like `io::copy`, but each read is passed on and flushed at once: frames must not wait for more.
fn copy(from: &mut dyn Read, to: &mut dyn Write) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                to.write_all(&buffer[..n])?;
                to.flush()?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
