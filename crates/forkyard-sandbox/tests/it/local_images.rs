//! Images as roots of the local provider: layouts, archives, a registry, and hostile ones.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use flate2::{Compression, write::GzEncoder};
use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::conformance::{attacks, conformance};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ErrorKind, Labels, Provider, Result, Root, Sandbox};
use serde_json::json;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::docker_fixture::{bare_image, image, needed};
use crate::local::{as_ordinary_user, run_cases_on};
use crate::local_roots::{offline, sh};

fn sha(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// By the compressor's own program, as the tools that make images in parts have it: a frame for each part, and one that readers
/// skip.
fn zstd(program: &Path, data: &[u8]) -> Vec<u8> {
    let (first, rest) = data.split_at(data.len() / 3);
    let mut made = Vec::new();
    for part in [first, b"", rest] {
        let mut child = Command::new(program)
            .args(["-q", "-c", "--check"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdin, part) = (child.stdin.take().unwrap(), part.to_vec());
        let feeding = std::thread::spawn(move || stdin.write_all(&part).unwrap());
        let done = child.wait_with_output().unwrap();
        feeding.join().unwrap();
        assert!(done.status.success());
        made.extend(done.stdout);
        made.extend([0x5e, 0x2a, 0x4d, 0x18, 3, 0, 0, 0]);
        made.extend(b"toc");
    }
    made
}

/// Entries: kind, path, content or target. Paths are written as they are, whatever they lead to.
fn layer(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (kind, path, data) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o6755);
        header.set_mtime(1_000_000);
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        let is_link = matches!(kind, EntryType::Symlink | EntryType::Link);
        if is_link {
            header.as_gnu_mut().unwrap().linkname[..data.len()].copy_from_slice(data.as_bytes());
        }
        let content = if is_link { "" } else { data };
        header.set_size(content.len() as u64);
        header.set_cksum();
        tar.append(&header, content.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

fn config(layers: &[Vec<u8>], user: &str) -> Vec<u8> {
    let ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", sha(layer))).collect();
    let env = ["PATH=/bin", "FROM_IMAGE=yes"];
    json!({ "config": { "Env": env, "User": user, "WorkingDir": "/elsewhere" }, "rootfs": { "type": "layers", "diff_ids": ids } })
        .to_string()
        .into_bytes()
}

/// All that a registry serves or a layout holds: blobs by digest, and the manifest's digest.
fn blobs(layers: &[Vec<u8>], user: &str, pack: &dyn Fn(&[u8]) -> Vec<u8>) -> (Vec<Vec<u8>>, String) {
    let config = config(layers, user);
    let packed: Vec<Vec<u8>> = layers.iter().map(|layer| pack(layer)).collect();
    let describe = |data: &Vec<u8>| json!({ "digest": format!("sha256:{}", sha(data)), "size": data.len() });
    let manifest =
        json!({ "config": describe(&config), "layers": packed.iter().map(describe).collect::<Vec<_>>() });
    let manifest = manifest.to_string().into_bytes();
    let digest = sha(&manifest);
    (packed.into_iter().chain([config, manifest]).collect(), digest)
}

fn write_layout(dir: &Path, layers: &[Vec<u8>]) -> String {
    write_layout_for(dir, layers, "", &gzip)
}

fn write_layout_for(dir: &Path, layers: &[Vec<u8>], user: &str, pack: &dyn Fn(&[u8]) -> Vec<u8>) -> String {
    let (blobs, manifest) = blobs(layers, user, pack);
    let folder = dir.join("blobs/sha256");
    std::fs::create_dir_all(&folder).unwrap();
    for blob in blobs {
        std::fs::write(folder.join(sha(&blob)), blob).unwrap();
    }
    let index = json!({ "manifests": [
        { "digest": format!("sha256:{}", "0".repeat(64)), "platform": { "os": "plan9", "architecture": "mips" } },
        { "digest": format!("sha256:{manifest}") },
    ] });
    std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
    format!("oci:{}", dir.display())
}

fn write_archive(path: &Path, layers: &[Vec<u8>]) -> String {
    let mut tar = Builder::new(std::fs::File::create(path).unwrap());
    let mut add = |name: &str, data: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, data).unwrap();
    };
    let names: Vec<String> = (0..layers.len()).map(|i| format!("{i}/layer.tar")).collect();
    for (name, data) in names.iter().zip(layers) {
        add(name, data);
    }
    add("config.json", &config(layers, ""));
    add("manifest.json", json!([{ "Config": "config.json", "Layers": names }]).to_string().as_bytes());
    tar.finish().unwrap();
    format!("archive:{}", path.display())
}

/// A whole system, a layer that changes it, and one that takes things away.
fn busybox_layers() -> Option<Vec<Vec<u8>>> {
    let base = image(&needed("busybox")?, &[]);
    let change = layer(&[
        (EntryType::Directory, "gone/", ""),
        (EntryType::Regular, "gone/file", "x"),
        (EntryType::Directory, "cleared/", ""),
        (EntryType::Regular, "cleared/old", "old"),
        (EntryType::Regular, "setuid", "#!/bin/sh\n"),
        (EntryType::Link, "second", "setuid"),
        (EntryType::Symlink, "etc/secret", "/../../../etc/shadow"),
        (EntryType::Char, "etc/disk", ""),
    ]);
    let removal = layer(&[
        (EntryType::Regular, ".wh.gone", ""),
        (EntryType::Regular, "cleared/.wh..wh..opq", ""),
        (EntryType::Regular, "cleared/new", "new"),
    ]);
    Some(vec![base, change, removal])
}

fn provider() -> (LocalProvider, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (LocalProvider::new(&dir.path().join("state"), LocalOptions::default()).unwrap(), dir)
}

async fn make(provider: &LocalProvider, name: &str, reference: &str) -> Result<Arc<dyn Sandbox>> {
    let spec = offline(Root::Image(reference.into()));
    provider.create(&SandboxId::new(name).unwrap(), Attempt(1), &spec).await
}

async fn check_inside(sandbox: &Arc<dyn Sandbox>) {
    let script = "id -u; echo $FROM_IMAGE; ls -d /gone 2>&1; ls /cleared; stat -c %a /setuid; cat /etc/secret 2>&1; ls /etc/disk 2>&1
        echo mine >> /setuid && tail -n 1 /second; rm /etc/passwd && ls /etc/passwd 2>&1";
    let (_, out) = sh(sandbox, script).await;
    assert!(out.starts_with("1000\nyes\n"), "{out}");
    assert_eq!(out.matches("No such file").count(), 4, "{out}");
    assert!(out.contains("new\n755\n") && !out.contains("old"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_archives_and_a_registry_give_the_same() {
    let Some(layers) = busybox_layers() else { return };
    let (provider, dir) = provider();
    let address = serve(&layers).await;
    let references = [
        write_layout(&dir.path().join("layout"), &layers),
        write_archive(&dir.path().join("saved.tar"), &layers),
        format!("{address}/some/image:v1"),
    ];
    for (index, reference) in references.iter().enumerate() {
        let sandbox = make(&provider, &format!("image{index}"), reference).await.unwrap();
        check_inside(&sandbox).await;
    }
    let stored = || dir.path().join("state/layers").read_dir().unwrap().count();
    assert_eq!(stored(), 3, "layers are shared");
    let missing = make(&provider, "missing", &format!("{address}/some/other:v1")).await.err().unwrap();
    assert_eq!(missing.kind, ErrorKind::NotFound);
    assert_eq!(provider.images().unwrap().len(), 3);

    // All that a sandbox stands on stays; the layers go with the last image that has them.
    let unused = async |age, remove| provider.unused_images(age, &[], remove).await.unwrap();
    assert_eq!(unused(Duration::ZERO, true).await, []);
    for (index, reference) in references.iter().enumerate() {
        if index == 0 {
            provider.remove_image(reference).await.unwrap();
        }
        provider.destroy(&SandboxId::new(format!("image{index}")).unwrap()).await.unwrap();
    }
    assert_eq!(unused(Duration::from_secs(3600), true).await, []);
    let said = unused(Duration::ZERO, false).await;
    assert_eq!((said.len(), said[0].bytes, stored()), (2, 0, 3), "both have all layers");
    assert!(said[1].bytes > 100_000, "{said:?}");
    assert_eq!(unused(Duration::ZERO, true).await, said);
    provider.settle().await;
    assert_eq!((stored(), provider.list(&Labels::new()).await.unwrap().len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_may_be_compressed_with_zstd() {
    let (Some(layers), Some(program)) = (busybox_layers(), needed("zstd")) else { return };
    let (provider, dir) = provider();
    let pack = |layer: &[u8]| zstd(&program, layer);
    let reference = write_layout_for(&dir.path().join("layout"), &layers, "", &pack);
    let sandbox = make(&provider, "packed", &reference).await.unwrap();
    check_inside(&sandbox).await;
    provider.destroy(&SandboxId::new("packed").unwrap()).await.unwrap();

    // One that ends too early, in a frame or in what is skipped, and one that goes on with something else.
    let damaged = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let pack = |layer: &[u8]| {
            let mut packed = pack(layer);
            change(&mut packed);
            packed
        };
        // Not one that is there already.
        let layer = layer(&[(EntryType::Regular, name, "content")]);
        write_layout_for(&dir.path().join(name), &[layer], "", &pack)
    };
    for (name, reference) in [
        ("early", damaged("early", &|packed| packed.truncate(packed.len() / 2))),
        ("skipped", damaged("skipped", &|packed| packed.truncate(packed.len() - 1))),
        ("more", damaged("more", &|packed| packed.extend(b"more"))),
    ] {
        let refused = make(&provider, name, &reference).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{name}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_images_user_is_the_user_inside() {
    let Some(mut layers) = busybox_layers() else { return };
    let passwd = "root:x:0:0:root:/root:/bin/sh\nkeeper:x:4321:4321::/home/keeper:/bin/sh\n";
    layers.push(layer(&[
        (EntryType::Regular, "etc/passwd", passwd),
        (EntryType::Directory, "home/keeper/", ""),
    ]));
    let (provider, dir) = provider();
    let reference = write_layout_for(&dir.path().join("layout"), &layers, "keeper:keeper", &gzip);
    let sandbox = make(&provider, "kept", &reference).await.unwrap();
    let look = "id -u; whoami; echo $USER $HOME; cd; echo mine > file && cat file; pwd";
    let want = "4321\nkeeper\nkeeper /home/keeper\nmine\n/home/keeper\n";
    assert_eq!(sh(&sandbox, look).await, (0, want.into()));
    assert_eq!(sh(&sandbox, "pwd").await.1, "/workspace\n");
    let snapshot = SnapshotId::new("kept").unwrap();
    sandbox.snapshot(&snapshot, &Labels::new()).await.unwrap();
    let child = offline(Root::Snapshot(snapshot.clone()));
    let child = provider.create(&SandboxId::new("child").unwrap(), Attempt(1), &child).await.unwrap();
    assert_eq!(sh(&child, look).await, (0, want.into()));
    let unknown = write_layout_for(&dir.path().join("unknown"), &layers, "stranger", &gzip);
    assert_eq!(make(&provider, "unknown", &unknown).await.err().unwrap().kind, ErrorKind::Invalid);
    for name in ["kept", "child"] {
        provider.destroy(&SandboxId::new(name).unwrap()).await.unwrap();
    }
    provider.remove_snapshot(&snapshot).await.unwrap();
    provider.remove_image(&reference).await.unwrap();
    provider.settle().await;
    crate::local::assert_empty(&dir.path().join("state"));
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_images_are_refused_and_leave_nothing() {
    let (provider, dir) = provider();
    let outside = dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let out = outside.display().to_string();
    let file = EntryType::Regular;
    let cases: Vec<Vec<u8>> = vec![
        layer(&[(file, "../escape", "x")]),
        layer(&[(file, "a/../../escape", "x")]),
        layer(&[(EntryType::Symlink, "way", &out), (file, "way/escape", "x")]),
        layer(&[(EntryType::Symlink, "way", ".."), (file, "way/escape", "x")]),
        layer(&[(EntryType::Link, "mine", "../../../../etc/passwd")]),
        layer(&[(EntryType::Symlink, "way", "/etc"), (EntryType::Link, "mine", "way/passwd")]),
        layer(&[(EntryType::Directory, "d/", ""), (file, "d/f", ""), (file, "d", "x")]),
        b"this is no archive at all, whatever it says".repeat(100),
    ];
    for (index, hostile) in cases.into_iter().enumerate() {
        let reference = write_layout(&dir.path().join(format!("hostile{index}")), &[hostile]);
        let refused = make(&provider, "hostile", &reference).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{index}: {refused}");
    }
    // What was changed on the way is noticed.
    let good = layer(&[(file, "file", "content")]);
    let changed = dir.path().join("changed");
    let reference = write_layout(&changed, std::slice::from_ref(&good));
    std::fs::write(changed.join("blobs/sha256").join(sha(&gzip(&good))), gzip(b"something else")).unwrap();
    assert_eq!(make(&provider, "hostile", &reference).await.err().unwrap().kind, ErrorKind::Invalid);
    for (reference, kind) in [
        ("oci:/no/such/layout", ErrorKind::NotFound),
        ("archive:/no/such/archive", ErrorKind::NotFound),
        ("Not An Image", ErrorKind::Invalid),
    ] {
        assert_eq!(make(&provider, "hostile", reference).await.err().unwrap().kind, kind, "{reference}");
    }
    provider.settle().await;
    assert_eq!(outside.read_dir().unwrap().count(), 0);
    for part in ["sandboxes", "layers", "images", "trash"] {
        let left: Vec<_> = dir.path().join("state").join(part).read_dir().unwrap().flatten().collect();
        assert!(left.is_empty(), "{part}: {left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_on_an_image() {
    let Some(layers) = busybox_layers() else { return };
    let dir = tempfile::tempdir().unwrap();
    let reference = write_archive(&dir.path().join("saved.tar"), &layers[..1]);
    let cases = conformance().into_iter().chain(attacks()).collect();
    run_cases_on(cases, offline(Root::Image(reference))).await;
}

#[test]
fn conformance_on_an_image_as_an_ordinary_user() {
    as_ordinary_user("local_images::conformance_on_an_image");
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_on_busybox_alone() {
    let Some(busybox) = needed("busybox") else { return };
    let dir = tempfile::tempdir().unwrap();
    let reference = write_archive(&dir.path().join("saved.tar"), &[bare_image(&busybox)]);
    run_cases_on(conformance(), offline(Root::Image(reference))).await;
}

#[test]
fn conformance_on_busybox_alone_as_an_ordinary_user() {
    as_ordinary_user("local_images::conformance_on_busybox_alone");
}

struct Served {
    blobs: Vec<Vec<u8>>,
    manifest: String,
    address: String,
}

/// A registry that wants a token first.
async fn serve(layers: &[Vec<u8>]) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (blobs, manifest) = blobs(layers, "", &gzip);
    let served = Arc::new(Served { blobs, manifest, address: address.clone() });
    let app = axum::Router::new()
        .route("/token", axum::routing::get(|| async { axum::Json(json!({ "token": "let-me-in" })) }))
        .route("/v2/some/image/{kind}/{name}", axum::routing::get(answer))
        .with_state(served);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

async fn answer(
    State(served): State<Arc<Served>>,
    UrlPath((kind, name)): UrlPath<(String, String)>,
    headers: HeaderMap,
) -> Response {
    if headers.get("authorization").is_none_or(|value| value != "Bearer let-me-in") {
        let challenge = format!("Bearer realm=\"http://{}/token\",service=\"here\"", served.address);
        return (StatusCode::UNAUTHORIZED, [("www-authenticate", challenge)]).into_response();
    }
    let want = if kind == "manifests" && name == "v1" {
        &served.manifest
    } else {
        name.trim_start_matches("sha256:")
    };
    match served.blobs.iter().find(|blob| sha(blob) == want) {
        Some(blob) => blob.clone().into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}
