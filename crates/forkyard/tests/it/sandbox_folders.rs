//! Files and folders of sandboxes, as documents and as copies.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::World;

fn inside(w: &World, script: &str) -> String {
    let ran = w.run(&["sandbox", "exec", "box1", "--", "sh", "-c", script]);
    assert_eq!(ran.code, 0, "{script}: {}", ran.stderr);
    ran.stdout
}

#[test]
fn a_folder_goes_in_and_comes_out() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    let from = w.repo().join("tree");
    w.write(&from.join("a.txt"), "one\n");
    w.write(&from.join("deep/er/b.sh"), "echo two\n");
    std::fs::create_dir(from.join("empty")).unwrap();
    std::fs::set_permissions(from.join("deep/er/b.sh"), PermissionsExt::from_mode(0o755)).unwrap();
    symlink("../a.txt", from.join("deep/link")).unwrap();
    symlink("/etc/hostname", from.join("away")).unwrap();
    // Under its own name where a folder is, else under the one that is said.
    for (args, at) in [
        (&["sandbox", "cp", "tree", "box1:/workspace"][..], "/workspace/tree"),
        (&["sandbox", "cp", "-r", "tree/.", "box1:/workspace/new"], "/workspace/new"),
    ] {
        let ran = w.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.stderr);
        assert!(ran.stdout.starts_with("2 files, 13 bytes"), "{}", ran.stdout);
        let script =
            format!("cd {at}; cat deep/link; sh deep/er/b.sh; [ -x deep/er/b.sh ]; ls empty; readlink away");
        assert_eq!(inside(&w, &script), "one\ntwo\n/etc/hostname\n");
    }
    let ran = w.run(&["sandbox", "cp", "box1:/workspace/tree", "out"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let out = w.repo().join("out");
    assert_eq!(std::fs::read_to_string(out.join("deep/link")).unwrap(), "one\n");
    assert_eq!(std::fs::read_link(out.join("deep/link")).unwrap().to_str(), Some("../a.txt"));
    assert!(out.join("empty").is_dir() && out.join("deep/er/b.sh").metadata().unwrap().mode() & 0o100 != 0);
    // Into a folder that is there, under its own name; and never into what is there.
    assert_eq!(w.run(&["sandbox", "cp", "box1:/workspace/tree/deep", "out"]).code, 2);
    std::fs::create_dir(w.repo().join("other")).unwrap();
    assert_eq!(w.run(&["sandbox", "cp", "box1:/workspace/tree/deep", "other"]).code, 0);
    assert!(w.repo().join("other/deep/er/b.sh").exists());
}

#[test]
fn what_comes_out_with_a_folder_leads_nowhere_else() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    inside(
        &w,
        "mkdir -p t/a/b; cd t; echo kept > a/kept; mkfifo fifo; ln -s /etc abs; ln -s ../.. a/rel; \
         ln -s .. a/b/up; ln -s up/../.. a/b/over; ln -s kept a/ok; truncate -s 64M holes",
    );
    let before = std::fs::read_dir(w.repo()).unwrap().count();
    let ran = w.run(&["sandbox", "cp", "box1:t", "out"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for left_out in ["t/fifo", "t/abs", "t/a/rel", "t/a/b/over"] {
        assert!(ran.stderr.contains(&format!("{left_out} is left out: ")), "{left_out}: {}", ran.stderr);
        assert!(w.repo().join("out").join(&left_out[2..]).symlink_metadata().is_err(), "{left_out}");
    }
    let out = w.repo().join("out");
    assert_eq!(std::fs::read_to_string(out.join("a/ok")).unwrap(), "kept\n");
    assert!(out.join("a/b/up").is_symlink());
    let holes = out.join("holes").metadata().unwrap();
    assert!(
        holes.len() == 64 << 20 && holes.blocks() * 512 < 8 << 20,
        "{} bytes of the disk",
        holes.blocks() * 512
    );
    // A link of the host's own that is in the place is not followed either.
    symlink(w.dir.path(), w.repo().join("there")).unwrap();
    symlink("nowhere", w.repo().join("dangling")).unwrap();
    assert_eq!(w.run(&["sandbox", "cp", "box1:t", "dangling"]).code, 2);
    // What fails half way leaves nothing.
    if !rustix::process::geteuid().is_root() {
        inside(&w, "touch t/zz; chmod 0 t/a");
        assert_ne!(w.run(&["sandbox", "cp", "box1:t", "half"]).code, 0);
    }
    assert_eq!(std::fs::read_dir(w.repo()).unwrap().count(), before + 3);
}

#[test]
fn a_file_is_a_document_with_its_text_or_its_bytes() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    inside(
        &w,
        "printf 'h\\303\\244\\n' > text; printf '\\377\\000' > bytes; truncate -s 17M large; : > empty",
    );
    let cat = |name: &str| w.json(&["--json", "sandbox", "cat", "box1", name]);
    let text = cat("text");
    assert_eq!((&text["schema"], &text["path"]), (&"forkyard.file/1".into(), &"text".into()));
    assert_eq!(
        (text["text"].as_str(), text["bytes"].as_u64(), text["base64"].is_null()),
        (Some("hä\n"), Some(4), true)
    );
    let bytes = cat("bytes");
    let plain = STANDARD.decode(bytes["base64"].as_str().unwrap()).unwrap();
    assert_eq!((plain.as_slice(), bytes["text"].is_null()), (&[0xff, 0][..], true));
    assert_eq!(cat("empty")["text"], "");
    let large = cat("large");
    assert_eq!((&large["schema"], &large["exit_code"]), (&"forkyard.error/1".into(), &1.into()), "{large}");
    let ran = w.run(&["--json", "sandbox", "shell", "box1"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stdout.contains("a shell has no document"), "{}", ran.stdout);
}
