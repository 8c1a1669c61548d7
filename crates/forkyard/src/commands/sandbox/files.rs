use std::io::SeekFrom;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use clap::Args;
use forkyard_core::SandboxId;
use forkyard_sandbox::{ExecRequest, FileKind, Sandbox};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

use super::stream::Signals;
use super::tree::{self, Copied};
use super::{observe, said};
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session::day;
use crate::render::table::{left, right};
use crate::render::{Cell, Table};

/// Bytes that are asked for at a time.
pub(super) const PIECE: u64 = 1 << 20;

#[derive(Debug, Clone, Args)]
pub struct CpArgs {
    /// A file or folder of the host, or SANDBOX:PATH.
    #[arg(value_name = "FROM")]
    pub from: String,
    /// The same; one of the two is inside. What is copied goes into a folder that is there, under its own name.
    #[arg(value_name = "TO")]
    pub to: String,
    /// Folders are copied with all that is in them, with this or without it. Out of a sandbox come no links that lead out of the
    /// folder, and nothing that is there is replaced.
    #[arg(short, long)]
    pub recursive: bool,
}

enum End {
    Host(PathBuf),
    Inside(SandboxId, String),
}

/// `./a:b` is a file of the host; before a colon stands a sandbox otherwise.
fn end(text: &str) -> Result<End> {
    match text.split_once(':') {
        Some((id, path)) if !id.contains(['/', '.']) => {
            Ok(End::Inside(SandboxId::new(id)?, path.to_string()))
        }
        Some(_) | None => Ok(End::Host(text.into())),
    }
}

impl CpArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        match (end(&self.from)?, end(&self.to)?) {
            (End::Host(from), End::Inside(id, path)) => {
                let sandbox = observe(place, &id).await?;
                let named = |e| {
                    CliError::usage(format!("{}: {e}", from.display()))
                        .hint("name a file or folder of this machine that can be read")
                };
                let mut file = tokio::fs::File::open(&from).await.map_err(named)?;
                let meta = file.metadata().await?;
                if meta.is_dir() {
                    // `.` has a name of its own.
                    let name = match from.file_name() {
                        Some(_) => from.clone(),
                        None => from.canonicalize().map_err(named)?,
                    };
                    let path = into_folder(&*sandbox, &path, &name).await?;
                    place.record("sandbox.write_file", id.as_str(), json!({ "path": path })).await?;
                    let copied = tree::copy_in(&*sandbox, &from, &path).await?;
                    return said(out, "cp", &id, &whole(&copied, &format!("{id}:{path}")));
                }
                if !meta.is_file() {
                    return Err(CliError::usage(format!("{} is neither file nor folder", from.display()))
                        .hint("write what it gives to a file, and copy that"));
                }
                let mode = meta.permissions().mode() & 0o777;
                let path = into_folder(&*sandbox, &path, &from).await?;
                place.record("sandbox.write_file", id.as_str(), json!({ "path": path })).await?;
                let bytes = sandbox.write_file_from(&path, &mut file, Some(mode)).await?;
                said(out, "cp", &id, &format!("{bytes} bytes to {id}:{path}"))
            }
            (End::Inside(id, path), End::Host(to)) => {
                let sandbox = observe(place, &id).await?;
                let to = match Path::new(&path).file_name() {
                    Some(name) if to.is_dir() => to.join(name),
                    Some(_) | None => to,
                };
                let mut signals = Signals::take()?;
                let copy = async {
                    if sandbox.stat(&path).await.is_ok_and(|found| found.kind == FileKind::Dir) {
                        let copied = tree::copy_out(&*sandbox, &path, &to).await?;
                        return Ok(whole(&copied, &to.display().to_string()));
                    }
                    let bytes = copy_out(&*sandbox, &path, &to).await?;
                    Ok::<_, CliError>(format!("{bytes} bytes to {}", to.display()))
                };
                let text = tokio::select! {
                    copied = copy => copied?,
                    // Returns, so that nothing half written stays.
                    _ = signals.recv() => return Ok(Exit::Interrupted),
                };
                said(out, "cp", &id, &text)
            }
            (End::Host(_), End::Host(_)) | (End::Inside(..), End::Inside(..)) => {
                Err(CliError::usage("one of the two has to be inside a sandbox")
                    .hint("write it as SANDBOX:PATH, such as s1:/workspace/a.txt"))
            }
        }
    }
}

fn whole(copied: &Copied, to: &str) -> String {
    let files = if copied.files == 1 { "file" } else { "files" };
    format!("{} {files}, {} bytes to {to}", copied.files, copied.bytes)
}

/// `to` is as it was until all of the file is there, or at least known to be.
async fn copy_out(sandbox: &dyn Sandbox, path: &str, to: &Path) -> Result<u64> {
    let named = |e: std::io::Error| CliError::failure(format!("{}: {e}", to.display()));
    let mut piece = sandbox.read_file(path, 0, PIECE).await?;
    let target = Target::open(to).map_err(|e| {
        CliError::usage(format!("{}: {e}", to.display()))
            .hint("name a place of this machine that can be written to, in a folder that is there")
    })?;
    let mut file = tokio::fs::File::from_std(target.file().map_err(named)?);
    // What is all zeros may be a hole, and then there is no end to what it would take here.
    let holes = matches!(target, Target::Beside(..));
    let (mut offset, mut hole) = (0, false);
    while !piece.is_empty() {
        offset += piece.len() as u64;
        hole = holes && piece.iter().all(|byte| *byte == 0);
        if hole {
            file.seek(SeekFrom::Start(offset)).await.map_err(named)?;
        } else {
            file.write_all(&piece).await.map_err(named)?;
        }
        piece = sandbox.read_file(path, offset, PIECE).await?;
    }
    file.flush().await.map_err(named)?;
    if hole {
        file.set_len(offset).await.map_err(named)?;
    }
    target.finish().map_err(named)?;
    Ok(offset)
}

/// A file of the host that is being written.
enum Target {
    /// Takes the place of the file when it is whole.
    Beside(NamedTempFile, PathBuf),
    InPlace(std::fs::File),
}

impl Target {
    fn open(to: &Path) -> std::io::Result<Target> {
        // Behind a link lies the file that is meant.
        let real = to.canonicalize().unwrap_or_else(|_| to.to_path_buf());
        let mode = match real.metadata() {
            Ok(meta) if is_replaceable(&meta) => Some(meta.permissions()),
            Ok(_) => return Target::in_place(&real),
            Err(_) if to.is_symlink() => return Target::in_place(to),
            Err(_) => None,
        };
        let parent = real.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        parent.metadata()?;
        // As for any new file: the process's mask is taken off.
        let open = std::fs::Permissions::from_mode(0o666);
        let beside = tempfile::Builder::new().prefix(".forkyard.").permissions(open).tempfile_in(parent);
        match (beside, mode) {
            (Ok(file), mode) => {
                if let Some(mode) = mode {
                    file.as_file().set_permissions(mode)?;
                }
                Ok(Target::Beside(file, real))
            }
            // The file may be written to all the same, though its folder may not.
            (Err(_), Some(_)) => Target::in_place(&real),
            // It names the file beside, which nobody asked for.
            (Err(e), None) => Err(e.kind().into()),
        }
    }

    fn in_place(path: &Path) -> std::io::Result<Target> {
        std::fs::File::create(path).map(Target::InPlace)
    }

    fn file(&self) -> std::io::Result<std::fs::File> {
        match self {
            Target::Beside(file, _) => file.as_file().try_clone(),
            Target::InPlace(file) => file.try_clone(),
        }
    }

    fn finish(self) -> std::io::Result<()> {
        match self {
            Target::Beside(file, path) => file.persist(path).map(drop).map_err(|e| e.error),
            Target::InPlace(_) => Ok(()),
        }
    }
}

/// Devices, pipes, files of others and those with more names than one stay what they are.
fn is_replaceable(meta: &std::fs::Metadata) -> bool {
    meta.is_file() && meta.nlink() == 1 && meta.uid() == rustix::process::geteuid().as_raw()
}

/// A folder inside gets the file under its own name.
async fn into_folder(sandbox: &dyn Sandbox, path: &str, from: &Path) -> Result<String> {
    let path = if path.is_empty() { "/workspace" } else { path };
    let is_dir = path.ends_with('/') || sandbox.stat(path).await.is_ok_and(|f| f.kind == FileKind::Dir);
    match from.file_name().and_then(|n| n.to_str()) {
        Some(name) if is_dir => Ok(format!("{}/{name}", path.trim_end_matches('/'))),
        Some(_) | None => Ok(path.to_string()),
    }
}

#[derive(Debug, Clone, Args)]
pub struct LsArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// The folder.
    #[arg(value_name = "PATH", default_value = "/workspace")]
    pub path: String,
}

impl LsArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let files = observe(place, &self.sandbox).await?.list_files(&self.path).await?;
        if out.json {
            out.json(&json!({ "schema": "forkyard.files/1", "path": self.path, "files": files }))?;
            return Ok(Exit::Success);
        }
        if files.is_empty() {
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![left("Mode"), right("Size"), left("Changed (UTC)"), left("Name")]);
        for f in &files {
            let (mark, end) = match f.kind {
                FileKind::File => ('-', String::new()),
                FileKind::Dir => ('d', "/".into()),
                FileKind::Symlink => {
                    ('l', f.symlink_target.as_ref().map_or(String::new(), |t| format!(" -> {t}")))
                }
                FileKind::Other => ('?', String::new()),
            };
            table.row(vec![
                format!("{mark}{:04o}", f.mode & 0o7777).into(),
                f.size.to_string().into(),
                day(f.modified).into(),
                Cell::new(format!("{}{end}", f.name)),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}

#[derive(Debug, Clone, Args)]
pub struct CatArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// The file.
    #[arg(value_name = "PATH")]
    pub path: String,
}

impl CatArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let sandbox = observe(place, &self.sandbox).await?;
        let mut offset = 0;
        let mut whole = Vec::new();
        loop {
            let piece = sandbox.read_file(&self.path, offset, PIECE).await?;
            if piece.is_empty() {
                if out.json {
                    out.json(&self.document(whole))?;
                }
                return Ok(Exit::Success);
            }
            offset += piece.len() as u64;
            if out.json {
                if offset > ExecRequest::DEFAULT_MAX_OUTPUT {
                    let most = ExecRequest::DEFAULT_MAX_OUTPUT >> 20;
                    let message = format!("{}: a document holds at most {most} MiB", self.path);
                    return Err(CliError::failure(message).hint("leave --json out: bytes have no bound"));
                }
                whole.extend_from_slice(&piece);
            } else if out.style.is_terminal() {
                out.text(&crate::render::plain_block(&String::from_utf8_lossy(&piece)))?;
            } else {
                out.bytes(&piece)?;
            }
        }
    }

    fn document(&self, whole: Vec<u8>) -> Value {
        let bytes = whole.len();
        let (text, base64) = match String::from_utf8(whole) {
            Ok(text) => (Some(text), None),
            Err(e) => (None, Some(BASE64.encode(e.as_bytes()))),
        };
        json!({
            "schema": "forkyard.file/1", "sandbox_id": self.sandbox, "path": self.path, "bytes": bytes,
            "text": text, "base64": base64,
        })
    }
}
