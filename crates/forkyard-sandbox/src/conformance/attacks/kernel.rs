//! The kernel: system calls, the supervisor, privileges, descriptors and terminals.

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;

use forkyard_guest::protocol::{Op, Request, VERSION, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::attack;
use super::stage::{PATIENCE, PROBE, bring_probe, dial, probe};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run, sh};
use crate::{ExecRequest, PtySize, Sandbox};

pub fn cases() -> Vec<Case> {
    vec![
        attack!(the_supervisor_is_closed, [7], "/proc/1: environment, root, working folder, descriptors, maps",
            Denied by "supervisor that can't be looked into"),
        attack!(the_supervisors_program_stays, [8], "The supervisor's own program, overwritten as /proc/self/exe",
            Denied by local "sealed file in memory" docker "read-only mount"),
        attack!(namespaces_and_mounts, [16], "unshare, clone, setns, mount, pivot_root, chroot", Denied by "seccomp"),
        attack!(privileges, [17], "setuid(0), capabilities kept, raised or written to a file, device nodes",
            Denied by "no capabilities"),
        attack!(setuid_programs_give_nothing, [17], "setuid programs, own and the system's",
            Denied by local "no_new_privs, nosuid" docker "no_new_privs"),
        attack!(the_supervisor_is_not_traced, [18], "ptrace, memory and descriptors of the supervisor",
            Denied by "supervisor that can't be looked into"),
        attack!(the_supervisor_survives_signals, [18], "Every signal to the supervisor", Harmless by "pid namespace"),
        attack!(host_processes_are_not_seen, [18], "The host's processes, sockets and shared memory",
            Denied by "pid, net and ipc namespaces"),
        attack!(dangerous_calls, [19], "bpf, userfaultfd, io_uring, keys, perf, modules, kexec, odd sockets, 32-bit calls",
            Denied by "seccomp, no capabilities"),
        attack!(helpers_of_the_kernel, [20], "cgroup release_agent, core_pattern, modprobe, sysrq",
            Denied by local "no /sys, /proc without rights" docker "masked /sys, read-only /proc/sys"),
        attack!(descriptors_and_terminals, [21], "Inherited descriptors; typing into a terminal (TIOCSTI)",
            Denied by "close-on-exec, seccomp"),
        attack!(sockets_of_the_host, [21], "Abstract Unix sockets of the host; descriptors passed to the supervisor",
            Denied by local "net namespace, no socket inside" docker "net namespace, token"),
    ]
}

/// What the filter says, and the kernel to whoever lacks the rights. Anything else says that the attempt was no good one.
const REFUSALS: [libc::c_int; 5] =
    [libc::EPERM, libc::ENOSYS, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::ESOCKTNOSUPPORT];

/// By name: what the kernel said to each of the probe's attempts.
fn said(output: &str) -> Result<Vec<(&str, &str)>, Failed> {
    let mut results = Vec::new();
    for line in output.lines() {
        let [_, name, said] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
            results.clear();
            break;
        };
        results.push((name, said));
    }
    if results.is_empty() {
        return Err(Failed::before(Failed::new(format!("the probe did not run: {output}"))));
    }
    Ok(results)
}

/// The probe's attempts that worked.
pub fn worked(output: &str) -> Result<Vec<String>, Failed> {
    let worked =
        |(name, said): (&str, &str)| (said == "0" || said == "fork-failed").then(|| name.to_string());
    Ok(said(output)?.into_iter().filter_map(worked).collect())
}

/// Every attempt of these attacks, none of which may work.
pub async fn refused(ctx: &Ctx, numbers: &[&str]) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let worked = worked(&probe(&sandbox, numbers).await?)?;
    ensure!(worked.is_empty(), "these worked: {worked:?}");
    Ok(())
}

/// The same where somebody says no to the call itself, whatever it is about.
async fn refused_as_calls(ctx: &Ctx, number: &str) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let output = probe(&sandbox, &[number]).await?;
    let killed = format!("signal {}", libc::SIGSYS);
    let is_refusal = |said: &str| said == killed || said.parse().is_ok_and(|errno| REFUSALS.contains(&errno));
    let others: Vec<_> = said(&output)?.into_iter().filter(|(_, said)| !is_refusal(said)).collect();
    ensure!(others.is_empty(), "these were not refused as calls: {others:?}");
    Ok(())
}

async fn the_supervisor_is_closed(ctx: &Ctx) -> CaseResult {
    refused(ctx, &["7"]).await
}
async fn namespaces_and_mounts(ctx: &Ctx) -> CaseResult {
    refused_as_calls(ctx, "16").await
}
async fn privileges(ctx: &Ctx) -> CaseResult {
    refused(ctx, &["17"]).await
}
async fn the_supervisor_is_not_traced(ctx: &Ctx) -> CaseResult {
    refused(ctx, &["18"]).await
}
async fn dangerous_calls(ctx: &Ctx) -> CaseResult {
    refused_as_calls(ctx, "19").await
}
async fn helpers_of_the_kernel(ctx: &Ctx) -> CaseResult {
    refused(ctx, &["20"]).await
}

async fn the_supervisors_program_stays(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let refused = worked(&probe(&sandbox, &["8"]).await?)?;
    ensure!(refused.is_empty(), "these worked: {refused:?}");
    // Started by the supervisor, the script's interpreter is the supervisor's own program.
    sandbox.write_file("evil", "#!/proc/self/exe probe\n".into(), Some(0o755)).await?;
    let output = run(&sandbox, ExecRequest::new(["/workspace/evil"])).await;
    if let Ok(output) = output {
        ensure!(!output.out.contains("opened"), "the program could be written: {}", output.out);
    }
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn setuid_programs_give_nothing(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "cp /bin/sh mine; chmod 6755 mine; ./mine -c 'id -u'; (su -c id root || sudo -n id || mount -t tmpfs x /tmp) </dev/null 2>/dev/null
        grep -E 'CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status";
    let output = sh(&sandbox, script).await?.out;
    ensure!(!output.starts_with("0\n") && !output.contains("uid=0"), "{output}");
    for line in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        ensure!(output.contains(line), "no {line} in {output}");
    }
    Ok(())
}

async fn the_supervisor_survives_signals(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output = sh(
        &sandbox,
        "for s in HUP INT QUIT ABRT KILL SEGV TERM STOP USR1; do kill -$s 1; done; echo tried; kill -9 -1",
    )
    .await?;
    ensure!(output.out.contains("tried"), "{output}", output = output.out);
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn host_processes_are_not_seen(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output = sh(&sandbox, "ls -d /proc/[0-9]* | wc -l; cat /proc/net/unix | wc -l; ls /dev/shm | wc -l")
        .await?
        .out;
    let numbers: Vec<u32> = output.lines().filter_map(|n| n.trim().parse().ok()).collect();
    let [processes, sockets, shared] = numbers[..] else {
        return Err(Failed::new(format!("no numbers: {output}")));
    };
    ensure!(processes < 8, "{processes} processes");
    ensure!(sockets <= 4, "{sockets} Unix sockets");
    ensure_eq!(shared, 0);
    Ok(())
}

async fn descriptors_and_terminals(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let argv = [PROBE, "probe", "21"];
    let mut requests = vec![ExecRequest::new(argv)];
    if ctx.provider.capabilities().pty {
        requests.push(ExecRequest { pty: Some(PtySize { cols: 80, rows: 24 }), ..ExecRequest::new(argv) });
    }
    for request in requests {
        let output = run(&sandbox, request).await?.out.replace('\r', "");
        let worked = worked(&output)?;
        ensure!(worked.is_empty(), "these worked: {worked:?}");
    }
    Ok(())
}

async fn sockets_of_the_host(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    let name = format!("forkyard-{}-{}", std::process::id(), sandbox.id());
    let abstract_name = SocketAddr::from_abstract_name(&name)?;
    let host = UnixListener::bind_addr(&abstract_name)?;
    host.set_nonblocking(true)?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("host.sock");
    let named = UnixListener::bind(&path)?;
    named.set_nonblocking(true)?;
    for target in [format!("@{name}"), path.display().to_string()] {
        for kind in ["unix", "rights"] {
            if dial(&sandbox, &[kind, &target]).await?.is_ok() {
                return Err(Failed::new(format!("{target} was reached")));
            }
        }
    }
    ensure!(host.accept().is_err() && named.accept().is_err(), "somebody came");
    flood_the_supervisor(&sandbox).await
}

/// Where the supervisor has a socket inside, it takes no descriptors and no word without a token.
async fn flood_the_supervisor(sandbox: &Arc<dyn Sandbox>) -> CaseResult {
    const INSIDE: &str = "/.forkyard/run/guest.sock";
    let said = probe(sandbox, &["rights", INSIDE]).await?;
    ensure!(said.starts_with("refused") || said.starts_with("connected"), "{said}");
    let hello = Op::Hello { version: VERSION, attempt: 9, token: Some("guess".into()) };
    // Nor does it take another environment or a longer life from there.
    let env = BTreeMap::from([("LD_PRELOAD".to_string(), "/tmp/mine.so".to_string())]);
    let adopt = Op::Adopt { lifetime_ms: 86_400_000, env };
    // In our words: another refusal would say nothing of the token.
    for (op, refusal) in [(hello, "wrong token"), (adopt.clone(), "say hello first")] {
        // Where there is no such socket nobody can say a word to it.
        let Ok(mut stream) = dial(sandbox, &["unix", INSIDE]).await? else { break };
        // Right behind it: whoever was refused is not heard again.
        let both = [(1, op), (2, adopt.clone())].map(|(seq, op)| encode(&Request { seq, op }, b""));
        stream.write_all(&both.concat()).await?;
        let mut answer = Vec::new();
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .map_err(|_| Failed::new("the supervisor did not send away whoever came"))??;
        let answer = String::from_utf8_lossy(&answer);
        ensure!(answer.contains(refusal), "the supervisor did not say {refusal:?}: {answer}");
        ensure!(!answer.contains("welcome"), "the supervisor greeted whoever came: {answer}");
        ensure!(!answer.contains("done"), "the supervisor did as whoever came said: {answer}");
    }
    ensure_eq!(sh(sandbox, "echo alive ${LD_PRELOAD-}").await?.out.trim_end(), "alive");
    Ok(())
}
