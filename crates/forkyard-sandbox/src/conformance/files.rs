//! Files, search, export.

use bytes::Bytes;

use super::{Case, CaseResult, Ctx, case, ensure, ensure_eq, sh};
use crate::{ErrorKind, FileKind, GitExport, GlobRequest, GrepRequest, SandboxSpec, TreeEntry, Volume};

pub fn cases() -> Vec<Case> {
    vec![
        case!(write_read_stat_list_remove),
        case!(binary_and_large_files),
        case!(odd_names),
        case!(an_archive_is_unpacked),
        case!(an_archive_leads_nowhere_else),
        case!(only_regular_files_are_read),
        case!(errors_are_typed),
        case!(glob_knows_gitignore),
        case!(grep_knows_gitignore),
        case!(git_export_finds_what_changed),
        case!(git_export_is_bounded),
        case!(volumes_are_what_was_said, |c| c.volumes),
    ]
}

async fn volumes_are_what_was_said(ctx: &Ctx) -> CaseResult {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir()?;
    let (shown, given) = (dir.path().join("shown"), dir.path().join("given"));
    for folder in [&shown, &given] {
        std::fs::create_dir(folder)?;
        std::fs::write(folder.join("file"), "from outside")?;
        // Root's sandboxes are an ordinary user's, and so are folders that they may write to.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder, Some(1000), Some(1000))?;
            std::os::unix::fs::chown(folder.join("file"), Some(1000), Some(1000))?;
        }
    }
    let volume = |host: &std::path::Path, path: &str, writable| Volume {
        host_path: host.display().to_string(),
        path: path.into(),
        writable,
    };
    let volumes = vec![volume(&shown, "/mnt/shown", false), volume(&given, "/mnt/given", true)];
    let sandbox = ctx.sandbox_with(&SandboxSpec { volumes, ..ctx.spec.clone() }).await?;
    ensure_eq!(sh(&sandbox, "cat /mnt/shown/file /mnt/given/file").await?.out, "from outsidefrom outside");
    for attempt in ["echo x > /mnt/shown/file", "echo x > /mnt/shown/new", "rm -f /mnt/shown/file"] {
        ensure!(sh(&sandbox, attempt).await?.result.exit_code != 0, "{attempt}: a read-only folder took it");
    }
    ensure_eq!(std::fs::read_to_string(shown.join("file"))?, "from outside");
    ensure_eq!(std::fs::read_dir(&shown)?.count(), 1);
    let wrote =
        sh(&sandbox, "echo more >> /mnt/given/file && mkdir /mnt/given/d && echo new > /mnt/given/d/new")
            .await?;
    ensure_eq!((wrote.result.exit_code, wrote.err.as_str()), (0, ""));
    ensure_eq!(std::fs::read_to_string(given.join("file"))?, "from outsidemore\n");
    ensure_eq!(std::fs::read_to_string(given.join("d/new"))?, "new\n");
    let owner = given.metadata()?;
    for made in ["d", "d/new"] {
        let made = given.join(made).metadata()?;
        ensure_eq!((made.uid(), made.gid()), (owner.uid(), owner.gid()));
    }
    ctx.provider.destroy(sandbox.id()).await?;
    ensure_eq!(std::fs::read_to_string(given.join("d/new"))?, "new\n");
    Ok(())
}

async fn write_read_stat_list_remove(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sandbox.write_file("a/b/c.sh", "#!/bin/sh\necho run\n".into(), Some(0o755)).await?;
    ensure_eq!(sh(&sandbox, "a/b/c.sh").await?.out, "run\n");
    let info = sandbox.stat("a/b/c.sh").await?;
    ensure_eq!((info.name.as_str(), info.kind, info.size, info.mode), ("c.sh", FileKind::File, 19, 0o755));
    sandbox.write_file("/workspace/a/b/c.sh", "new".into(), None).await?;
    ensure_eq!(sandbox.stat("a/b/c.sh").await?.mode, 0o755);
    ensure_eq!(sandbox.read_file("a/b/c.sh", 1, 1).await?, "e");
    ensure_eq!(sandbox.read_file("a/b/c.sh", 100, 1).await?, "");
    sh(&sandbox, "ln -s b/c.sh a/link; mkdir a/dir").await?;
    let listed: Vec<_> =
        sandbox.list_files("a").await?.into_iter().map(|f| (f.name, f.kind, f.symlink_target)).collect();
    let want = [
        ("b", FileKind::Dir, None),
        ("dir", FileKind::Dir, None),
        ("link", FileKind::Symlink, Some("b/c.sh")),
    ];
    ensure_eq!(listed, want.map(|(n, k, t)| (n.to_string(), k, t.map(String::from))).to_vec());
    sandbox.write_file("a/link", "through".into(), None).await?;
    ensure_eq!(sandbox.read_file("a/b/c.sh", 0, 100).await?, "through");
    sandbox.remove("a/link", false).await?;
    ensure_eq!(sandbox.remove("a", false).await.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    sandbox.remove("a", true).await?;
    ensure_eq!(sandbox.stat("a").await.err().map(|e| e.kind), Some(ErrorKind::NotFound));
    sandbox.make_dir("x/y/z").await?;
    sandbox.make_dir("x/y/z").await?;
    ensure_eq!(sandbox.stat("x/y/z").await?.kind, FileKind::Dir);
    Ok(())
}

async fn binary_and_large_files(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let all: Bytes = (0..=255u8).collect::<Vec<_>>().into();
    sandbox.write_file("bytes", all.clone(), None).await?;
    ensure_eq!(sandbox.read_file("bytes", 0, 1000).await?, all);
    let large: Bytes =
        (0..100_000_000u32).map(|i| (i.wrapping_mul(2654435761) >> 24) as u8).collect::<Vec<_>>().into();
    sandbox.write_file("large", large.clone(), None).await?;
    ensure!(sandbox.read_file("large", 0, u64::MAX).await? == large, "a large file came back changed");
    let written = sandbox.write_file_from("streamed", &mut &large[..], None).await?;
    ensure_eq!(written, large.len() as u64);
    ensure_eq!(sh(&sandbox, "cmp large streamed && echo same").await?.out, "same\n");
    let left = sandbox
        .list_files("/workspace")
        .await?
        .into_iter()
        .filter(|f| f.name.starts_with(".forkyard"))
        .count();
    ensure_eq!(left, 0);
    Ok(())
}

/// Entries: path, content of a file or `->` and the target of a link; executable if the path ends in `.sh`.
fn archive(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put = |name: &str, kind: u8, data: &str, target: &str| {
        let mut h = [0_u8; 512];
        h[..name.len().min(100)].copy_from_slice(&name.as_bytes()[..name.len().min(100)]);
        h[100..107].copy_from_slice(if name.ends_with(".sh") { b"0000755" } else { b"0000644" });
        h[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
        h[156] = kind;
        h[157..157 + target.len()].copy_from_slice(target.as_bytes());
        out.extend(h);
        out.extend(data.as_bytes());
        out.resize(out.len().next_multiple_of(512), 0);
    };
    for (name, data) in entries {
        if name.len() > 100 {
            let rest = name.len() + " path=\n".len();
            let length = (rest..).find(|n| *n == rest + n.to_string().len()).unwrap_or(rest);
            put("pax", b'x', &format!("{length} path={name}\n"), "");
        }
        match data.strip_prefix("->") {
            Some(target) => put(name, b'2', "", target),
            None => put(name, b'0', data, ""),
        }
    }
    out.resize(out.len() + 1024, 0);
    out
}

async fn an_archive_is_unpacked(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(200));
    let big = "0123456789".repeat(100_000);
    sh(&sandbox, "mkdir -p to/was-a-dir/x; echo old > to/a; ln -s /etc to/was-a-link; echo kept > to/kept")
        .await?;
    let entries = [
        ("a", "new\n"),
        ("empty", ""),
        ("sub/run.sh", "#!/bin/sh\necho run\n"),
        ("sub/link", "->../a"),
        (long.as_str(), "long"),
        ("sp ace\nline", "odd"),
        ("big", big.as_str()),
        ("was-a-dir", "file now\n"),
        ("was-a-link/inside", "dir now\n"),
    ];
    sandbox.unpack("to", &mut &archive(&entries)[..]).await?;
    ensure_eq!(
        sh(&sandbox, "cd to; cat a kept sub/link was-a-dir was-a-link/inside; sub/run.sh; stat -c %s empty; cmp /etc/inside a 2>/dev/null || echo safe")
            .await?
            .out,
        "new\nkept\nnew\nfile now\ndir now\nrun\n0\nsafe\n"
    );
    ensure_eq!(sandbox.read_file(&format!("to/{long}"), 0, 10).await?, "long");
    ensure_eq!(sandbox.read_file("to/sp ace\nline", 0, 10).await?, "odd");
    ensure!(
        sandbox.read_file("to/big", 0, u64::MAX).await? == big.as_bytes(),
        "a large file came out changed"
    );
    let whole = archive(&entries);
    for cut in [0, 100, 600, whole.len() - 1024] {
        let e = sandbox.unpack("cut", &mut &whole[..cut]).await.err();
        ensure_eq!(e.map(|e| e.kind), Some(ErrorKind::Invalid));
    }
    Ok(())
}

async fn an_archive_leads_nowhere_else(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    for name in ["../out", "/tmp/out", "a/../../out", "a//b", "./a", "a/", ""] {
        let e = sandbox.unpack("to", &mut &archive(&[(name, "x")])[..]).await.err();
        ensure_eq!((name, e.map(|e| e.kind)), (name, Some(ErrorKind::Invalid)));
    }
    // A link that the archive itself brought is not followed.
    let entries = [("up", "->/tmp"), ("up/out", "x")];
    sandbox.unpack("to", &mut &archive(&entries)[..]).await?;
    ensure_eq!(sh(&sandbox, "ls /tmp; cat to/up/out").await?.out, "x");
    Ok(())
}

async fn odd_names(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let longest = "x".repeat(255);
    let names = ["new\nline", "-rf", "späce and ünïcode", "quote'\"", "*", "\\x41", longest.as_str(), "..."];
    for name in names {
        sandbox.write_file(name, name.as_bytes().to_vec().into(), None).await?;
        ensure_eq!(sandbox.read_file(name, 0, 1000).await?, name.as_bytes());
    }
    sh(&sandbox, "touch \"$(printf 'b\\377ad')\"").await?;
    let listed: Vec<String> = sandbox.list_files(".").await?.into_iter().map(|f| f.name).collect();
    ensure!(listed.contains(&"b\\xffad".to_string()), "{listed:?}");
    ensure!(listed.contains(&"new\nline".to_string()), "{listed:?}");
    for name in names {
        sandbox.remove(name, false).await?;
    }
    ensure_eq!(sandbox.list_files(".").await?.len(), 1);
    Ok(())
}

async fn only_regular_files_are_read(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sh(&sandbox, "mkfifo pipe; ln -s /dev/zero zero; ln -s pipe link; truncate -s 1099511627776 sparse")
        .await?;
    for path in ["pipe", "link", "zero", "/dev/tty", "/workspace"] {
        ensure_eq!(sandbox.read_file(path, 0, 10).await.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    }
    ensure_eq!(sandbox.read_file("sparse", 1 << 39, 10).await?, vec![0; 10]);
    // Nor what the kernel tells of the guest.
    for path in ["/proc/1/maps", "/proc/self/environ", "/proc/thread-self/status"] {
        let refused = sandbox.read_file(path, 0, 10).await.err().map(|e| e.kind);
        ensure_eq!((path, refused), (path, Some(ErrorKind::Denied)));
    }
    ensure_eq!(sandbox.list_files("/proc/1/fd").await.err().map(|e| e.kind), Some(ErrorKind::Denied));
    for path in ["/proc/mounts", "/proc/net/dev", "/proc/meminfo"] {
        ensure!(!sandbox.read_file(path, 0, 10).await?.is_empty(), "{path} is refused");
    }
    ensure!(sandbox.list_files("/proc").await.is_ok(), "/proc itself is refused");
    Ok(())
}

async fn errors_are_typed(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let kind = |e: Option<crate::SandboxError>| e.map(|e| e.kind);
    ensure_eq!(kind(sandbox.read_file("missing", 0, 1).await.err()), Some(ErrorKind::NotFound));
    ensure_eq!(kind(sandbox.list_files("missing").await.err()), Some(ErrorKind::NotFound));
    ensure_eq!(kind(sandbox.remove("missing", true).await.err()), Some(ErrorKind::NotFound));
    ensure_eq!(kind(sandbox.read_file("", 0, 1).await.err()), Some(ErrorKind::Invalid));
    ensure_eq!(kind(sandbox.read_file("a\0b", 0, 1).await.err()), Some(ErrorKind::Invalid));
    ensure_eq!(kind(sandbox.write_file("/", "x".into(), None).await.err()), Some(ErrorKind::Invalid));
    ensure_eq!(
        kind(sandbox.write_file(&"n".repeat(256), "x".into(), None).await.err()),
        Some(ErrorKind::Invalid)
    );
    sandbox.write_file("file", "x".into(), None).await?;
    ensure_eq!(
        kind(sandbox.write_file("file/below", "x".into(), None).await.err()),
        Some(ErrorKind::Invalid)
    );
    Ok(())
}

async fn tree(ctx: &Ctx) -> Result<std::sync::Arc<dyn crate::Sandbox>, super::Failed> {
    let sandbox = ctx.sandbox().await?;
    let files = [
        (".gitignore", "target/\n*.log\n"),
        ("src/main.rs", "fn main() {\n    // TODO one\n}\n"),
        ("src/deep/lib.rs", "// todo two\n"),
        ("target/out.rs", "// TODO built\n"),
        ("run.log", "TODO logged\n"),
        (".hidden/x.rs", "// TODO hidden\n"),
        (".git/config", "TODO git\n"),
    ];
    for (path, text) in files {
        sandbox.write_file(path, text.into(), None).await?;
    }
    Ok(sandbox)
}

async fn glob_knows_gitignore(ctx: &Ctx) -> CaseResult {
    let sandbox = tree(ctx).await?;
    let glob = async |pattern: &str, path: Option<&str>| {
        sandbox.glob(GlobRequest { pattern: pattern.into(), path: path.map(String::from), max: 0 }).await
    };
    ensure_eq!(glob("**/*.rs", None).await?, [".hidden/x.rs", "src/deep/lib.rs", "src/main.rs"]);
    ensure_eq!(glob("*.rs", Some("src")).await?, ["deep/lib.rs", "main.rs"]);
    ensure_eq!(glob("src/*.rs", None).await?, ["src/main.rs"]);
    ensure_eq!(glob("[", None).await.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    ensure_eq!(glob("*", Some("missing")).await.err().map(|e| e.kind), Some(ErrorKind::NotFound));
    Ok(())
}

async fn grep_knows_gitignore(ctx: &Ctx) -> CaseResult {
    let sandbox = tree(ctx).await?;
    let grep = async |request: GrepRequest| -> Result<Vec<String>, crate::SandboxError> {
        let found = sandbox.grep(request).await?;
        Ok(found.matches.into_iter().map(|m| format!("{}:{}:{}", m.path, m.line, m.text)).collect())
    };
    let base = GrepRequest { pattern: "TODO".into(), max: 100, ..GrepRequest::default() };
    ensure_eq!(grep(base.clone()).await?, [".hidden/x.rs:1:// TODO hidden", "src/main.rs:2:    // TODO one"]);
    let both = GrepRequest { ignore_case: true, glob: Some("src/**".into()), ..base.clone() };
    ensure_eq!(grep(both).await?, ["src/deep/lib.rs:1:// todo two", "src/main.rs:2:    // TODO one"]);
    let one = sandbox.grep(GrepRequest { max: 1, ..base.clone() }).await?;
    ensure_eq!((one.matches.len(), one.truncated), (1, true));
    let wrong = GrepRequest { pattern: "(".into(), ..base };
    ensure_eq!(grep(wrong).await.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    Ok(())
}

async fn git_export_finds_what_changed(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let entry = |path: &str, mode, oid: &str| TreeEntry { path: path.into(), mode, oid: oid.into() };
    const HELLO: &str = "ce013625030ba8dba906f756967f9e9ca394464a";
    let base = vec![
        entry("deleted", 0o100644, HELLO),
        entry("ignored.log", 0o100644, HELLO),
        entry("mode", 0o100644, HELLO),
        entry("same", 0o100644, HELLO),
        entry("text", 0o100644, HELLO),
        entry("turned/file", 0o100644, HELLO),
    ];
    let script = "for f in ignored.log mode same; do echo hello > $f; done; echo changed > text; chmod +x mode
        echo '*.log' > .gitignore; echo x > new.log; ln -s same link; mkdir .git d; echo x > .git/evil; echo deep > d/new
        echo file > turned; mkfifo pipe";
    sh(&sandbox, script).await?;
    let diff = sandbox.git_export(GitExport { repo: None, base, max_bytes: 1 << 20, max_files: 100 }).await?;
    let changed: Vec<_> = diff.changed.iter().map(|c| (c.path.as_str(), c.mode, &c.data[..])).collect();
    let want: Vec<(&str, u32, &[u8])> = vec![
        (".gitignore", 0o100644, b"*.log\n"),
        ("d/new", 0o100644, b"deep\n"),
        ("link", 0o120000, b"same"),
        ("mode", 0o100755, b"hello\n"),
        ("text", 0o100644, b"changed\n"),
        ("turned", 0o100644, b"file\n"),
    ];
    ensure_eq!(changed, want);
    ensure_eq!(diff.deleted, ["deleted", "turned/file"]);
    ensure_eq!(diff.skipped, ["pipe"]);
    Ok(())
}

async fn git_export_is_bounded(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sh(
        &sandbox,
        "head -c 2000000 /dev/zero > big; i=0; while [ $i -lt 50 ]; do echo $i > f$i; i=$((i+1)); done",
    )
    .await?;
    let export = async |max_bytes, max_files| {
        sandbox.git_export(GitExport { repo: None, base: vec![], max_bytes, max_files }).await
    };
    ensure_eq!(export(1_000_000, 1000).await.err().map(|e| e.kind), Some(ErrorKind::TooLarge));
    ensure_eq!(export(10_000_000, 10).await.err().map(|e| e.kind), Some(ErrorKind::TooLarge));
    ensure_eq!(export(10_000_000, 1000).await?.changed.len(), 51);
    Ok(())
}
