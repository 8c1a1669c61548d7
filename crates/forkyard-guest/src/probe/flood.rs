//! More than a sandbox may have.

use std::process::ExitCode;

/// Folders of this many files: none is slow by itself.
const IN_A_FOLDER: u64 = 1000;

/// Empty files without end, until one can't be made.
pub fn inodes(dir: &str) -> ExitCode {
    for number in 0u64.. {
        let folder = format!("{dir}/{}", number / IN_A_FOLDER);
        let made = if number.is_multiple_of(IN_A_FOLDER) { std::fs::create_dir_all(&folder) } else { Ok(()) };
        if let Err(e) = made.and_then(|()| std::fs::File::create(format!("{folder}/{number}")).map(drop)) {
            println!("{number} {e}");
            break;
        }
    }
    ExitCode::FAILURE
}
