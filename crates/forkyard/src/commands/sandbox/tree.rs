//! Folders that are copied into a sandbox or out of it.
//!
//! What comes out is hostile. It is made anew, in a folder that nobody else has yet, entry by entry: nothing that is there is
//! replaced or followed, and of links only those stay that lead nowhere else.

use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use forkyard_engine::git::tar;
use forkyard_sandbox::{FileInfo, FileKind, Sandbox};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

use super::files::PIECE;
use crate::error::{CliError, Result};
use crate::render::plain;

/// Files, folders and links that are taken out of a sandbox: more is no folder that somebody keeps.
const MAX_ENTRIES: u64 = 1_000_000;
/// Bytes that are taken out: holes count, and are read.
const MAX_BYTES: u64 = 1 << 40;
/// Folders within each other, in both directions.
const MAX_DEPTH: usize = 128;

/// What was copied.
#[derive(Default)]
pub struct Copied {
    pub files: u64,
    pub bytes: u64,
    entries: u64,
}

impl Copied {
    fn entry(&mut self) -> Result<()> {
        self.entries += 1;
        match self.entries > MAX_ENTRIES {
            true => Err(too_large(format!("there are more than {MAX_ENTRIES} files"))),
            false => Ok(()),
        }
    }

    fn taken(&mut self, bytes: u64) -> Result<()> {
        self.bytes += bytes;
        match self.bytes > MAX_BYTES {
            true => Err(too_large(format!("there is more than {} GiB", MAX_BYTES >> 30))),
            false => Ok(()),
        }
    }
}

fn too_large(what: String) -> CliError {
    CliError::failure(what).hint("copy a part of the folder, or pack it inside and copy the archive")
}

fn host(path: &Path, e: &std::io::Error) -> CliError {
    CliError::failure(format!("{}: {e}", path.display()))
}

fn left_out(what: impl std::fmt::Display, why: &str) {
    eprintln!("{}", plain(&format!("{what} is left out: {why}")));
}

/// A folder of the host, into one of a sandbox that is made if it is missing. Links are copied as they are.
pub async fn copy_in(sandbox: &dyn Sandbox, from: &Path, to: &str) -> Result<Copied> {
    let mut copied = Copied::default();
    let mut links = Vec::new();
    let mut open = vec![(from.to_path_buf(), String::new())];
    while let Some((dir, inside)) = open.pop() {
        if inside.split('/').count() > MAX_DEPTH {
            return Err(too_large(format!(
                "{}: more than {MAX_DEPTH} folders within each other",
                dir.display()
            )));
        }
        sandbox.make_dir(&under(to, &inside)).await?;
        for entry in std::fs::read_dir(&dir).map_err(|e| host(&dir, &e))? {
            let entry = entry.map_err(|e| host(&dir, &e))?;
            let path = entry.path();
            let Some(name) = entry.file_name().to_str().map(str::to_string) else {
                left_out(path.display(), "its name is not UTF-8");
                continue;
            };
            let inside = if inside.is_empty() { name } else { format!("{inside}/{name}") };
            let meta = path.symlink_metadata().map_err(|e| host(&path, &e))?;
            if meta.is_dir() {
                open.push((path, inside));
            } else if meta.is_symlink() {
                let target = std::fs::read_link(&path).map_err(|e| host(&path, &e))?;
                links.extend(tar::link(&inside, target.as_os_str().as_encoded_bytes(), 0));
            } else if meta.is_file() {
                let mut file = tokio::fs::File::open(&path).await.map_err(|e| host(&path, &e))?;
                let mode = Some(meta.permissions().mode() & 0o777);
                copied.bytes += sandbox.write_file_from(&under(to, &inside), &mut file, mode).await?;
                copied.files += 1;
            } else {
                left_out(path.display(), "it is neither file nor folder nor link");
            }
        }
    }
    if !links.is_empty() {
        links.extend(tar::END);
        sandbox.unpack(to, &mut links.as_slice()).await.map_err(|e| {
            let fix = "without the links, or packed with tar, the folder can be copied";
            e.or_hint(fix)
        })?;
    }
    Ok(copied)
}

fn under(dir: &str, inside: &str) -> String {
    match inside {
        "" => dir.to_string(),
        _ => format!("{}/{inside}", dir.trim_end_matches('/')),
    }
}

/// A folder of a sandbox, to a place of the host where nothing is yet.
pub async fn copy_out(sandbox: &dyn Sandbox, from: &str, to: &Path) -> Result<Copied> {
    if to.symlink_metadata().is_ok() {
        return Err(CliError::usage(format!("{} is there already", to.display())).hint(
            "name a place where nothing is yet: a folder that comes out of a sandbox is mixed with no other",
        ));
    }
    let parent = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Nobody else comes into it, and what is half there goes with it.
    let beside = tempfile::Builder::new().prefix(".forkyard.").tempdir_in(parent);
    let beside = beside.map_err(|e| host(parent, &e))?;
    let root = beside.path().join("copy");
    let mut copied = Copied::default();
    let mut open = vec![PathBuf::new()];
    while let Some(inside) = open.pop() {
        let dir = root.join(&inside);
        // Fails where anything is: no folder of ours is ever a link.
        std::fs::DirBuilder::new().mode(0o777).create(&dir).map_err(|e| host(&dir, &e))?;
        let shown = |name: &Path| under(from, &name.to_string_lossy());
        for entry in sandbox.list_files(&shown(&inside)).await? {
            copied.entry()?;
            let Some(name) = name_of(&entry) else {
                left_out(format!("{:?} in {}", entry.name, shown(&inside)), "that is no name of a file");
                continue;
            };
            let inside = inside.join(name);
            if inside.components().count() > MAX_DEPTH {
                return Err(too_large(format!("more than {MAX_DEPTH} folders within each other")));
            }
            match (entry.kind, entry.symlink_target) {
                (FileKind::Dir, _) => open.push(inside),
                (FileKind::File, _) => {
                    let mode = if entry.mode & 0o100 == 0 { 0o666 } else { 0o777 };
                    take(sandbox, &shown(&inside), &root.join(&inside), mode, &mut copied).await?;
                }
                (FileKind::Symlink, Some(target)) if stays_inside(&inside, Path::new(&target)) => {
                    let link = root.join(&inside);
                    std::os::unix::fs::symlink(target, &link).map_err(|e| host(&link, &e))?;
                }
                (FileKind::Symlink, _) => {
                    left_out(shown(&inside), "it is a link that leads out of the folder")
                }
                (FileKind::Other, _) => left_out(shown(&inside), "it is neither file nor folder nor link"),
            }
        }
    }
    std::fs::rename(&root, to).map_err(|e| host(to, &e))?;
    Ok(copied)
}

/// Of one entry of a folder, and of nothing else.
fn name_of(entry: &FileInfo) -> Option<&str> {
    let name = entry.name.as_str();
    let mut parts = Path::new(name).components();
    let one = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    (one && !name.contains('\0')).then_some(name)
}

/// Steps up come first and not beyond the folder that is copied; steps down are names alone. So whatever other links of the
/// folder a link leads over, each of them starts inside and ends there.
fn stays_inside(link: &Path, target: &Path) -> bool {
    let depth = link.components().count() - 1;
    let (mut up, mut down) = (0, false);
    for part in target.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if !down => up += 1,
            Component::Normal(_) => down = true,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    up <= depth
}

/// A new file. What is all zeros may be a hole, and stays one.
async fn take(sandbox: &dyn Sandbox, from: &str, to: &Path, mode: u32, copied: &mut Copied) -> Result<()> {
    let failed = |e: std::io::Error| host(to, &e);
    let open = std::fs::File::options().write(true).create_new(true).mode(mode).open(to);
    let mut file = tokio::fs::File::from_std(open.map_err(failed)?);
    let mut offset = 0;
    loop {
        let piece = sandbox.read_file(from, offset, PIECE).await?;
        if piece.is_empty() {
            break;
        }
        offset += piece.len() as u64;
        copied.taken(piece.len() as u64)?;
        if piece.iter().all(|byte| *byte == 0) {
            file.seek(std::io::SeekFrom::Start(offset)).await.map_err(failed)?;
        } else {
            file.write_all(&piece).await.map_err(failed)?;
        }
    }
    file.flush().await.map_err(failed)?;
    file.set_len(offset).await.map_err(failed)?;
    copied.files += 1;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_out_by_any_way_are_known() {
        let stays = |link: &str, target: &str| stays_inside(Path::new(link), Path::new(target));
        for (link, target) in
            [("l", "a"), ("l", "./a/b"), ("a/b/l", "../../c"), ("a/b/l", "../.."), ("l", ".")]
        {
            assert!(stays(link, target), "{link} -> {target}");
        }
        // The last one by way of another link, `a/b/up -> ../..`.
        for (link, target) in [
            ("l", "/etc"),
            ("l", ".."),
            ("a/l", "../.."),
            ("a/b/l", "../../../c"),
            ("a/b/l", "c/../d"),
            ("a/b/l", "up/../.."),
        ] {
            assert!(!stays(link, target), "{link} -> {target}");
        }
    }

    #[test]
    fn an_entry_has_a_name_of_its_folder() {
        let named = |name: &str| {
            let (kind, modified) = (FileKind::File, forkyard_core::Timestamp(0));
            let info = FileInfo { name: name.into(), kind, size: 0, mode: 0, modified, symlink_target: None };
            name_of(&info).is_some()
        };
        assert!(named("a") && named("...") && named(" ") && named("a\nb"));
        for bad in ["", ".", "..", "/", "a/b", "../a", "a/", "/etc", "a\0"] {
            assert!(!named(bad), "{bad:?}");
        }
    }
}
