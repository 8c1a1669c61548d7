//! Sandboxes that are one process's own: what outlives that process is nobody's, and goes.

use crate::Labels;
use crate::docker::record;

/// The label that names the process.
pub const OWNER: &str = "owner";

/// For a sandbox that is to go with this process.
pub fn mark() -> (String, String) {
    (OWNER.into(), record::maker())
}

/// Whether it belonged to a process that is no more.
pub fn is_orphan(labels: &Labels) -> bool {
    labels.get(OWNER).is_some_and(|owner| !record::is_at_work(owner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_gone_process_had_is_an_orphan() {
        assert!(!is_orphan(&Labels::new()));
        assert!(!is_orphan(&Labels::from([mark()])));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (key, me) = mark();
        let gone = me.replacen(&std::process::id().to_string(), &child.id().to_string(), 1);
        assert!(is_orphan(&Labels::from([(key.clone(), gone)])));
        assert!(
            !is_orphan(&Labels::from([(key, "somebody".into())])),
            "a name that says nothing counts as alive"
        );
    }
}
