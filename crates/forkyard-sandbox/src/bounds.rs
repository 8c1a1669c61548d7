//! What can't be asked of any provider, said before anything is made.

use std::collections::BTreeMap;

use crate::{ErrorKind, Limits, Result, SandboxError, SandboxSpec};

// Bounds of what makes sense; beyond them a number is a mistake.
const MIN_DISK: u64 = 1 << 20;
/// Of memory and of a disk: kernels and engines count with a sign.
const MAX_BYTES: u64 = i64::MAX as u64;
const MIN_CPUS: f64 = 0.01;
const MAX_CPUS: f64 = 4096.0;
const MAX_PROCESSES: u32 = 1 << 20;
const MAX_LIFETIME_MS: u64 = 366 * 24 * 3600 * 1000;
const MAX_LABELS: usize = 64;
const MAX_LABEL_BYTES: usize = 1024;
/// Of names and values together: the environment of every command.
pub(crate) const MAX_ENV_BYTES: usize = 64 << 10;

/// `min_memory`: below it this provider starts no program.
pub(crate) fn check(spec: &SandboxSpec, min_memory: u64) -> Result<()> {
    let refuse = |message: String, hint: &str| Err(SandboxError::new(ErrorKind::Invalid, message).hint(hint));
    let Limits { memory_bytes, cpus, disk_bytes, processes, network_bytes_per_s } = spec.limits;
    if !(min_memory..=MAX_BYTES).contains(&memory_bytes) {
        let hint = format!("use at least {} MiB", min_memory >> 20);
        return refuse(format!("limits.memory_bytes: {memory_bytes} is not possible"), &hint);
    }
    if !(MIN_CPUS..=MAX_CPUS).contains(&cpus) {
        return refuse(format!("limits.cpus: {cpus} is not possible"), "use 0.01 to 4096");
    }
    if !(MIN_DISK..=MAX_BYTES).contains(&disk_bytes) {
        return refuse(format!("limits.disk_bytes: {disk_bytes} is not possible"), "use at least 1 MiB");
    }
    if !(1..=MAX_PROCESSES).contains(&processes) {
        return refuse(format!("limits.processes: {processes} is not possible"), "use 1 to 1048576");
    }
    if network_bytes_per_s == Some(0) {
        let what = "limits.network_bytes_per_s: 0 is not possible";
        return refuse(what.into(), "use the network mode `none`");
    }
    if !(1..=MAX_LIFETIME_MS).contains(&spec.lifetime.0.0) {
        return refuse(
            format!("lifetime: {} is not possible", spec.lifetime.0),
            "use more than nothing and at most 366 days: 30m, 2h, 7d",
        );
    }
    let too_long = |map: &BTreeMap<String, String>, max| map.iter().any(|(k, v)| k.len() + v.len() > max);
    if spec.labels.len() > MAX_LABELS || too_long(&spec.labels, MAX_LABEL_BYTES) {
        return refuse(
            "labels: there are more than 64, or one has more than 1024 bytes".into(),
            "use at most 64 of at most 1024 bytes each",
        );
    }
    let can_be = |(name, value): &(&String, &String)| {
        !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
    };
    if let Some((name, _)) = spec.env.iter().find(|variable| !can_be(variable)) {
        return refuse(format!("env: {name:?} can't be a variable"), "no = in a name, no zero byte at all");
    }
    if spec.env.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > MAX_ENV_BYTES {
        return refuse("env: more than 64 KiB".into(), "put what is long into a file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_can_be_put_right() {
        let mut spec = SandboxSpec::default();
        assert!(check(&spec, 4 << 20).is_ok());
        spec.lifetime.0.0 = 0;
        let refused = check(&spec, 4 << 20).unwrap_err();
        assert!(refused.message.contains("lifetime") && refused.hint.unwrap().contains("more than nothing"));
        let few = check(&SandboxSpec::default(), 1 << 50).unwrap_err();
        assert!(few.hint.unwrap().contains("1073741824 MiB"));
    }
}
