//! Lists the files of the built dashboard, so that the program carries them.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("assets/web");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    below(&root, &mut files)?;
    files.sort();
    let mut list = String::from("&[\n");
    for file in files {
        let name = file.strip_prefix(&root).map_err(io::Error::other)?;
        let name = name.to_str().ok_or_else(|| io::Error::other("a name that is not UTF-8"))?;
        // Writing to a String does not fail.
        let _ = writeln!(list, "    (\"/{name}\", include_bytes!({file:?}) as &[u8]),");
    }
    list.push_str("]\n");
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("web.rs"), list)
}

fn below(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            below(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}
