//! Attempts from inside a sandbox, for the attack suite. They run as commands of the sandbox, with no more rights than any
//! other, and need nothing of the image.

mod calls;
mod flood;
mod memory;
mod net;

use std::process::ExitCode;

/// `numbers…`: system calls. `/SCRIPT`: started as that script's interpreter. Else one attempt by its name.
pub fn run(args: &[&str]) -> ExitCode {
    match args {
        ["tcp", address, port] => net::tcp(address, port),
        ["udp", address, port] => net::udp(address, port),
        ["unix", name] => net::unix(name),
        ["rights", name] => net::rights(name),
        ["listen", port, name] => net::listen(port, name),
        ["inodes", dir] => flood::inodes(dir),
        ["hop", file] => flood::hop(file),
        ["restless", file] => flood::restless(file),
        ["headless", mib] => flood::headless(mib),
        ["deep"] => flood::deep(),
        ["project", path] => flood::project(path),
        ["hold", way, dir] => flood::hold(way, dir),
        ["keep", way] => memory::keep(way),
        ["take", what] => flood::take(what),
        ["swap", links @ ..] => swap(links),
        [script] if script.starts_with('/') => rewrite(),
        numbers => calls::run(numbers),
    }
}

/// Links and what each leads to, for ever: one takes the place of the one before, so that there always is one.
fn swap(links: &[&str]) -> ExitCode {
    const NEW: &str = "new";
    loop {
        for pair in links.chunks_exact(2) {
            let put = std::os::unix::fs::symlink(pair[1], NEW).and_then(|()| std::fs::rename(NEW, pair[0]));
            if let Err(e) = put {
                println!("{pair:?} {e}");
                return ExitCode::FAILURE;
            }
        }
    }
}

/// Whoever was started through `/proc/self/exe` has the supervisor's own program before it, and tries to change it.
fn rewrite() -> ExitCode {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;
    let Ok(program) = File::open("/proc/self/exe") else {
        println!("closed");
        return ExitCode::SUCCESS;
    };
    println!("started");
    let again = format!("/proc/self/fd/{}", program.as_raw_fd());
    for path in ["/proc/self/exe", again.as_str(), "/proc/1/exe"] {
        match OpenOptions::new().write(true).open(path) {
            Ok(_) => println!("{path} opened"),
            Err(e) => println!("{path} {}", e.raw_os_error().unwrap_or(0)),
        }
    }
    ExitCode::SUCCESS
}
