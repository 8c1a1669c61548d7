//! Shared memory, semaphores and messages of System V: they are there without a process, until somebody removes them.

/// What the kernel takes for each semaphore.
const SEMAPHORE: u64 = 64;
/// The same for each message, beside its text.
const MESSAGE: u64 = 64;

#[derive(Clone, Copy)]
enum Kind {
    Memory,
    Semaphores,
    Messages,
}

const KINDS: [Kind; 3] = [Kind::Memory, Kind::Semaphores, Kind::Messages];

impl Kind {
    /// The namespace's table: a line of names, then one for each object.
    fn table(self) -> String {
        let path = match self {
            Kind::Memory => "/proc/sysvipc/shm",
            Kind::Semaphores => "/proc/sysvipc/sem",
            Kind::Messages => "/proc/sysvipc/msg",
        };
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Bytes of one line.
    fn bytes(self, row: &[u64]) -> u64 {
        let number = |i: usize| row.get(i).copied().unwrap_or(0);
        match self {
            // Resident and swapped: what is only promised takes nothing.
            Kind::Memory => number(14) + number(15),
            Kind::Semaphores => number(3) * SEMAPHORE,
            Kind::Messages => number(3) + number(4) * MESSAGE,
        }
    }

    fn remove(self, id: i32) {
        // SAFETY: IPC_RMID takes no memory of ours.
        unsafe {
            match self {
                Kind::Memory => libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()),
                Kind::Semaphores => libc::semctl(id, 0, libc::IPC_RMID),
                Kind::Messages => libc::msgctl(id, libc::IPC_RMID, std::ptr::null_mut()),
            };
        }
    }
}

/// A key may be negative: whatever is no number is zero.
fn rows(table: &str) -> impl Iterator<Item = Vec<u64>> + '_ {
    table
        .lines()
        .skip(1)
        .map(|line| line.split_ascii_whitespace().map(|word| word.parse().unwrap_or(0)).collect())
}

/// What all of it in this namespace takes.
pub fn bytes() -> u64 {
    KINDS.iter().map(|kind| rows(&kind.table()).map(|row| kind.bytes(&row)).sum::<u64>()).sum()
}

/// Removes all that is in this namespace: for when nobody is left who could use it.
pub fn clear() {
    for kind in KINDS {
        for row in rows(&kind.table()) {
            if let Some(id) = row.get(1).and_then(|id| i32::try_from(*id).ok()) {
                kind.remove(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_their_columns() {
        let shm = "key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap\n\
            -7 3 1600 9999 5 5 0 1000 1000 1000 1000 1 2 3 4096 8192\n";
        let sem = "key semid perms nsems uid gid cuid cgid otime ctime\n0 0 600 32000 0 0 0 0 0 1\n";
        let msg = "key msqid perms cbytes qnum lspid lrpid uid gid cuid cgid stime rtime ctime\n\
            0 1 600 100 2 1 0 0 0 0 0 1 0 1\n";
        let of = |kind: Kind, table| rows(table).map(|row| kind.bytes(&row)).collect::<Vec<_>>();
        assert_eq!(of(Kind::Memory, shm), [12288]);
        assert_eq!(of(Kind::Semaphores, sem), [32000 * 64]);
        assert_eq!(of(Kind::Messages, msg), [228]);
    }
}
