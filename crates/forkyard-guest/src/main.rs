//! Forkyard's program inside a sandbox.
//!
//! - `forkyard-guest zygote`: what local sandboxes are cloned from; stdin is its command socket. A clone sets up its
//!   namespaces, gives everything up and serves as pid 1.
//! - `forkyard-guest trees`: answers one question on its stdin about folders of the host with mounts of them.
//! - `forkyard-guest restack`: puts the root that comes by its stdin under a quiet sandbox.
//! - `forkyard-guest serve SOCKET`: pid 1 of a container; configuration comes from the environment variable `FORKYARD_GUEST`.
//! - `forkyard-guest probe …`: the attack suite's attempts, from inside.
//! - `forkyard-guest unpack FILE FOLDER`: the files of a snapshot, brought back as a command of the sandbox.
//! - `forkyard-guest remove FOLDER`: on the host, what a sandbox may have made as hard to remove as it could.
//! - `forkyard-guest connect SOCKET`: carries the protocol between its own stdio and the socket of `serve`.

mod files;
mod local;
mod probe;
mod relay;
mod serve;
mod sys;

fn main() -> std::process::ExitCode {
    // Kernels before 6.4 tell it by a file of /proc that is closed to us once others may not look into us.
    let _ = rustix::param::page_size();
    sys::process::heed_signals();
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.get(1..).unwrap_or_default() {
        ["zygote"] => local::run(),
        ["trees"] => local::trees(),
        ["restack"] => local::restack(),
        ["serve", socket] => serve::container(socket),
        ["connect", socket] => relay::run(socket),
        ["unpack", archive, folder] => files::archive::unpack_command(archive, folder),
        ["remove", folder] => files::tree::remove_command(folder),
        ["probe", attempt @ ..] => probe::run(attempt),
        _ => {
            eprintln!(
                "usage: forkyard-guest zygote | trees | restack | serve SOCKET | connect SOCKET | unpack FILE FOLDER | remove FOLDER | probe …"
            );
            std::process::ExitCode::from(2)
        }
    }
}
