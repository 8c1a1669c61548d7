//! What a hostile image, archive or folder tries against the Docker provider.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use bollard::Docker;
use bollard::models::{ContainerConfig, ContainerCreateBody};
use bollard::query_parameters::{
    CommitContainerOptionsBuilder, CreateContainerOptionsBuilder, InspectContainerOptions,
    ListContainersOptionsBuilder, ListImagesOptionsBuilder, RemoveContainerOptionsBuilder,
    RemoveImageOptionsBuilder, TagImageOptionsBuilder,
};
use forkyard_core::{Attempt, SnapshotId};
use forkyard_sandbox::docker::{DockerOptions, DockerProvider};
use forkyard_sandbox::{ErrorKind, Labels, Provider, Root, Sandbox, SandboxSpec, Volume};
use futures::StreamExt;

use crate::docker::{connect, left};
use crate::docker_fixture::{Daemon, IMAGE, bare_image, id, import, needed, sh, spec};
use crate::local::{OneWord, as_user_with};

const FIRST: Attempt = Attempt(1);

fn of(image: &str) -> SandboxSpec {
    SandboxSpec { root: Root::Image(image.into()), ..spec() }
}

/// Makes an image of nothing but busybox and these: folders that anybody may write to, and links.
async fn make(docker: &Docker, busybox: &Path, name: &str, folders: &[&str], link: Option<(&str, &str)>) {
    let mut image = bare_image(busybox);
    // What was written ends with two empty blocks: an archive goes on before them.
    image.truncate(image.len() - 1024);
    let mut tar = tar::Builder::new(image);
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_size(0);
    header.set_mode(0o1777);
    for folder in folders {
        tar.append_data(&mut header.clone(), folder, std::io::empty()).unwrap();
    }
    if let Some((link, to)) = link {
        header.set_entry_type(tar::EntryType::Symlink);
        tar.append_link(&mut header, link, to).unwrap();
    }
    import(docker, name, tar.into_inner().unwrap()).await;
}

/// An image with more in its configuration, by Dockerfile's words.
async fn changed(docker: &Docker, from: &str, changes: &str, name: &str) -> String {
    let body = ContainerCreateBody {
        image: Some(from.into()),
        entrypoint: Some(vec!["/bin/busybox".into()]),
        ..Default::default()
    };
    let options = CreateContainerOptionsBuilder::default().build();
    let container = docker.create_container(Some(options), body).await.unwrap().id;
    let (repo, tag) = name.split_once(':').unwrap();
    let options = CommitContainerOptionsBuilder::default();
    let options = options.container(&container).repo(repo).tag(tag).changes(changes).build();
    docker.commit_container(options, ContainerConfig::default()).await.unwrap();
    let remove = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
    docker.remove_container(&container, Some(remove)).await.unwrap();
    known(docker, name).await.unwrap()
}

/// The same archive by other names.
fn retagged(from: &Path, to: &Path, names: &serde_json::Value) {
    let mut old = tar::Archive::new(std::fs::File::open(from).unwrap());
    let mut new = tar::Builder::new(std::fs::File::create(to).unwrap());
    for entry in old.entries().unwrap() {
        let mut entry = entry.unwrap();
        let (path, mut header) = (entry.path().unwrap().into_owned(), entry.header().clone());
        match path.to_str().unwrap() {
            "manifest.json" => {
                let mut images: serde_json::Value = serde_json::from_reader(&mut entry).unwrap();
                images[0]["RepoTags"] = names.clone();
                let text = images.to_string();
                header.set_size(text.len() as u64);
                new.append_data(&mut header, path, text.as_bytes()).unwrap();
            }
            "repositories" => {}
            _ => match entry.link_name().unwrap() {
                Some(target) => new.append_link(&mut header, path, target).unwrap(),
                None => new.append_data(&mut header, path, &mut entry).unwrap(),
            },
        }
    }
    new.finish().unwrap();
}

/// The id of what the engine knows by that name.
async fn known(docker: &Docker, name: &str) -> Option<String> {
    docker.inspect_image(name).await.ok()?.id
}

async fn tag(docker: &Docker, image: &str, repo: &str, tag: &str) {
    let options = TagImageOptionsBuilder::default().repo(repo).tag(tag).build();
    docker.tag_image(image, Some(options)).await.unwrap();
}

/// Images were last used then.
fn long_ago(state: &Path) {
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(7 * 24 * 3600);
    for used in state.join("images").read_dir().unwrap().flatten() {
        std::fs::File::options().write(true).open(used.path()).unwrap().set_modified(then).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_takes_no_name_from_another_image() {
    let Some(daemon) = Daemon::start().await else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let provider = connect(&daemon, state.path(), None).await;
    provider.create(&id("first"), FIRST, &spec()).await.unwrap();
    let images = docker.list_images(None::<bollard::query_parameters::ListImagesOptions>).await.unwrap();
    let prepared = images.iter().flat_map(|i| &i.repo_tags).find(|t| t.starts_with("forkyard-prepared:"));
    let prepared = prepared.unwrap().clone();
    let before = (known(&docker, IMAGE).await, known(&docker, &prepared).await);

    // An archive of another image by the names of these two and by one that nobody has.
    let evil = changed(&docker, IMAGE, "ENV MARK=evil", "evil:1").await;
    let names = [IMAGE, &prepared, "python:3"];
    let file = state.path().join("evil.tar");
    for name in names {
        let (repo, version) = name.split_once(':').unwrap();
        tag(&docker, &evil, repo, version).await;
    }
    let mut archive = std::fs::File::create(&file).unwrap();
    let mut pieces = Box::pin(docker.export_images(&names));
    while let Some(piece) = pieces.next().await {
        archive.write_all(&piece.unwrap()).unwrap();
    }
    for (name, id) in [(IMAGE, &before.0), (&prepared, &before.1)] {
        let (repo, version) = name.split_once(':').unwrap();
        tag(&docker, id.as_ref().unwrap(), repo, version).await;
    }
    for name in ["python:3", "evil:1"] {
        docker.remove_image(name, Some(RemoveImageOptionsBuilder::default().build()), None).await.unwrap();
    }

    // One of them twice and first, which an engine tells twice.
    let twice = state.path().join("twice.tar");
    retagged(&file, &twice, &serde_json::json!(["zz:1", "zz:1", IMAGE]));
    let archive = of(&format!("archive:{}", twice.display()));
    let sandbox = provider.create(&id("zz"), FIRST, &archive).await.unwrap();
    assert_eq!(sh(&sandbox, "echo $MARK").await, "evil\n");
    provider.destroy(&id("zz")).await.unwrap();
    assert_eq!((known(&docker, IMAGE).await, known(&docker, "zz:1").await), (before.0.clone(), None));

    let archive = of(&format!("archive:{}", file.display()));
    for name in ["second", "third"] {
        let sandbox = provider.create(&id(name), FIRST, &archive).await.unwrap();
        assert_eq!(sh(&sandbox, "echo $MARK").await, "evil\n");
        assert_eq!((known(&docker, IMAGE).await, known(&docker, &prepared).await), before);
        assert_eq!(known(&docker, "python:3").await, None);
    }
    // It is kept for as long as a snapshot stands on it.
    let (third, snapshot) =
        (provider.attach(&id("third"), FIRST).await.unwrap(), SnapshotId::new("kept").unwrap());
    third.snapshot(&snapshot, &Labels::new()).await.unwrap();
    for name in ["second", "third"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    // Twice: what was prepared of it stands on it too, and goes first. A record that can't be read may name any image.
    let record = state.path().join("snapshots/kept/snapshot.json");
    let whole = std::fs::read(&record).unwrap();
    for content in [b"{".as_slice(), &whole] {
        std::fs::write(&record, content).unwrap();
        for _ in 0..2 {
            long_ago(state.path());
            provider.sweep().await.unwrap();
        }
        let found = docker.inspect_image(&evil).await.expect("its image is there");
        assert!(found.repo_tags.unwrap_or_default().iter().any(|tag| tag.starts_with("forkyard-loaded:")));
    }
    let child = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..spec() };
    let child = provider.create(&id("second"), FIRST, &child).await.unwrap();
    assert_eq!(sh(&child, "echo $MARK").await, "evil\n");
    provider.remove_snapshot(&snapshot).await.unwrap();

    // Nor is what was prepared looked up by a name that somebody else could move.
    let (repo, version) = prepared.split_once(':').unwrap();
    tag(&docker, &evil, repo, version).await;
    let sandbox = provider.create(&id("fourth"), FIRST, &spec()).await.unwrap();
    assert_eq!(sh(&sandbox, "echo $MARK; id -un").await, "\nuser\n");
    for name in ["first", "second", "fourth"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    assert_eq!(left(&daemon).await, (0, 0));
}

/// What `docker save` makes of the image.
async fn saved(docker: &Docker, name: &str) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut pieces = Box::pin(docker.export_image(name));
    while let Some(piece) = pieces.next().await {
        archive.extend_from_slice(&piece.unwrap());
    }
    archive
}

/// All that the engine has, with and without names.
async fn images(docker: &Docker) -> usize {
    let all = ListImagesOptionsBuilder::default().all(true).build();
    docker.list_images(Some(all)).await.unwrap().len()
}

/// One whose name went before what stands on it would stay for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_an_archives_image() {
    let Some(daemon) = Daemon::start().await else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let provider = connect(&daemon, state.path(), None).await;
    changed(&docker, IMAGE, "ENV MARK=archive", "saved:1").await;
    let file = state.path().join("saved.tar");
    std::fs::write(&file, saved(&docker, "saved:1").await).unwrap();
    docker.remove_image("saved:1", Some(RemoveImageOptionsBuilder::default().build()), None).await.unwrap();
    let archive = of(&format!("archive:{}", file.display()));
    let sandbox = provider.create(&id("box"), FIRST, &archive).await.unwrap();
    assert_eq!(sh(&sandbox, "echo $MARK").await, "archive\n");
    provider.destroy(&id("box")).await.unwrap();
    for (name, takes_space) in [("forkyard-prepared:", false), ("forkyard-loaded:", true)] {
        long_ago(state.path());
        for remove in [false, true] {
            let gone = provider.unused_images(std::time::Duration::ZERO, &[], remove).await.unwrap();
            let [image] = gone.as_slice() else { panic!("{gone:?}") };
            assert!(image.name.starts_with(name) && (image.bytes > 0) == takes_space, "{image:?}");
        }
    }
    assert_eq!(images(&docker).await, 1);
    assert_eq!(state.path().join("images").read_dir().unwrap().count(), 0);
}

/// Two processes at the same time, and one that did not live to write down what it had made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_prepared_once() {
    let Some(daemon) = Daemon::start().await else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let (one, other) =
        (connect(&daemon, state.path(), None).await, connect(&daemon, state.path(), None).await);
    let (a, b) = (id("a"), id("b"));
    let of_both = (spec(), spec());
    let (first, second) =
        tokio::join!(one.create(&a, FIRST, &of_both.0), other.create(&b, FIRST, &of_both.1));
    assert_eq!((first.is_ok(), second.is_ok(), images(&docker).await), (true, true, 2));
    one.destroy(&a).await.unwrap();
    one.destroy(&b).await.unwrap();
    let made: Vec<_> = state.path().join("images").read_dir().unwrap().flatten().collect();
    assert_eq!(made.len(), 1);
    std::fs::write(made[0].path(), "").unwrap();
    one.create(&a, FIRST, &spec()).await.unwrap();
    assert_eq!(images(&docker).await, 2);
    one.destroy(&a).await.unwrap();
}

/// An archive with these members, as they come.
fn archive_of(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, data) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, *data).unwrap();
    }
    tar.into_inner().unwrap()
}

/// Where an archive ends before its last member does, what follows that one in ours would be taken for its content, and the
/// content of the next for an archive with names of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_that_claims_more_than_it_has_takes_no_name_either() {
    const BLOCK: usize = 512;
    let Some(daemon) = Daemon::start().await else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let provider = connect(&daemon, state.path(), None).await;
    let before = known(&docker, IMAGE).await;
    changed(&docker, IMAGE, "ENV MARK=evil", "evil:1").await;
    let (plain, named) = (state.path().join("plain.tar"), state.path().join("named.tar"));
    std::fs::write(&plain, saved(&docker, "evil:1").await).unwrap();
    retagged(&plain, &named, &serde_json::json!([IMAGE, "python:3"]));
    docker.remove_image("evil:1", Some(RemoveImageOptionsBuilder::default().build()), None).await.unwrap();

    let manifest = serde_json::json!([{ "Config": "config.json", "Layers": ["short", "next"] }]).to_string();
    let mut hostile = archive_of(&[
        ("config.json", b"{}"),
        ("manifest.json", manifest.as_bytes()),
        ("next", &std::fs::read(&named).unwrap()),
        ("short", &[0; BLOCK]),
    ]);
    // The end of the archive and what the last member has.
    hostile.truncate(hostile.len() - 3 * BLOCK);
    let file = state.path().join("hostile.tar");
    std::fs::write(&file, hostile).unwrap();
    let of_archive = of(&format!("archive:{}", file.display()));
    let refused = provider.create(&id("hostile"), FIRST, &of_archive).await.err().unwrap();
    assert_eq!((known(&docker, IMAGE).await, known(&docker, "python:3").await), (before, None));
    assert!(refused.kind == ErrorKind::Invalid && refused.hint.is_some(), "{refused}");

    // One of holes, which would be larger than any image is.
    let manifest = serde_json::json!([{ "Config": "config.json", "Layers": ["hole", "hole"] }]).to_string();
    let mut large = archive_of(&[("config.json", b"{}"), ("manifest.json", manifest.as_bytes())]);
    large.truncate(large.len() - 2 * BLOCK);
    let mut header = tar::Header::new_gnu();
    header.set_path("hole").unwrap();
    header.set_size(33 << 30);
    header.set_cksum();
    large.extend(header.as_bytes());
    std::fs::write(&file, large).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(34 << 30).unwrap();
    let refused = provider.create(&id("hostile"), FIRST, &of_archive).await.err().unwrap();
    assert!(refused.message.contains("more than 64 GiB") && refused.hint.is_some(), "{refused}");
    assert_eq!(left(&daemon).await, (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_images_volumes_and_labels_are_its_makers_word() {
    let (Some(daemon), Some(busybox)) = (Daemon::start().await, needed("busybox")) else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let provider = connect(&daemon, state.path(), None).await;
    let real = provider.create(&id("real"), FIRST, &spec()).await.unwrap();

    // Its volumes lie in memory, within bounds: nothing of it is on the engine's disk beside what is measured.
    make(&docker, &busybox, "folders:1", &["data", "run", "deep", "deep/er"], None).await;
    let volumes = r#"VOLUME ["/data", "/run", "/a/../deep/er/", "/workspace/own"]"#;
    changed(&docker, "folders:1", volumes, "volumes:1").await;
    let sandbox = provider.create(&id("volumes"), FIRST, &of("volumes:1")).await.unwrap();
    let script = "for d in /data /run /deep/er; do stat -f -c %T $d; echo x > $d/x && echo small; \
        head -c 2G /dev/zero > $d/big 2>/dev/null && echo all; rm -f $d/big; done; stat -f -c %T /workspace/own";
    assert_eq!(sh(&sandbox, script).await, "tmpfs\nsmall\n".repeat(3) + "tmpfs\n");
    assert_eq!(left(&daemon).await, (2, 6), "three volumes each");

    // A relative one leads elsewhere when it is mounted than it seems to.
    for (number, odd) in ["../../../workspace", "data"].into_iter().enumerate() {
        let name = format!("relative:{number}");
        changed(&docker, "folders:1", &format!("VOLUME {odd}"), &name).await;
        let refused = provider.create(&id("relative"), FIRST, &of(&name)).await.err().unwrap();
        assert!(refused.kind == ErrorKind::Invalid && refused.hint.is_some(), "{refused}");
    }

    // What it says of itself makes its containers nobody's sandbox.
    let all = ListContainersOptionsBuilder::default().all(true).build();
    let containers = docker.list_containers(Some(all)).await.unwrap();
    let labels =
        containers.iter().find_map(|c| c.labels.clone().filter(|l| l["dev.forkyard.sandbox"] == "real"));
    let mut labels = labels.unwrap();
    let info = labels["dev.forkyard.info"].replace("\"real\"", "\"forged\"");
    labels.insert("dev.forkyard.sandbox".into(), "forged".into());
    labels.insert("dev.forkyard.info".into(), info);
    labels.insert("dev.forkyard.maker".into(), "1.1.1".into());
    let body = ContainerCreateBody {
        image: Some(IMAGE.into()),
        entrypoint: Some(vec!["/bin/busybox".into()]),
        labels: Some(labels),
        ..Default::default()
    };
    let options = CreateContainerOptionsBuilder::default().name("somebodys").build();
    docker.create_container(Some(options), body).await.unwrap();
    let listed = provider.list(&Labels::new()).await.unwrap();
    assert_eq!(listed.iter().map(|info| info.id.as_str()).collect::<Vec<_>>(), ["real", "volumes"]);
    provider.sweep().await.unwrap();
    assert!(docker.inspect_container("somebodys", None::<InspectContainerOptions>).await.is_ok());
    assert_eq!(sh(&real, "echo alive").await, "alive\n");
    let remove = RemoveContainerOptionsBuilder::default().force(true).build();
    docker.remove_container("somebodys", Some(remove)).await.unwrap();
    for name in ["real", "volumes"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    assert_eq!(left(&daemon).await, (0, 0));
}

/// Not a test by itself: an ordinary user makes sandboxes of images whose volumes or links have the engine make folders in what the
/// host shares. Each is refused, and nothing is left of it: what the engine makes is root's, and nobody else could remove it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by another test"]
async fn nothing_of_roots_is_left_by() {
    let (Ok(host), Ok(images)) = (std::env::var("HOSTILE_HOST"), std::env::var("HOSTILE_IMAGES")) else {
        return;
    };
    let state = tempfile::tempdir().unwrap();
    let shown = state.path().join("shown");
    std::fs::create_dir(&shown).unwrap();
    let options = DockerOptions {
        host: Some(host),
        image: Some(IMAGE.into()),
        egress: Some(Arc::new(OneWord("hello"))),
        ..DockerOptions::default()
    };
    let provider = DockerProvider::connect(&state.path().join("state"), options).await.unwrap();
    for image in images.split(' ') {
        let host_path = shown.display().to_string();
        let volume = Volume { host_path, path: "/data/shown".into(), writable: true };
        let with = SandboxSpec { volumes: vec![volume], ..of(image) };
        let made = provider.create(&id("box"), FIRST, &with).await;
        if made.is_ok() {
            // Some come into being with the second start.
            provider.stop(&id("box")).await.unwrap();
            let _ = provider.start(&id("box"), FIRST).await;
        }
        provider.destroy(&id("box")).await.unwrap();
        assert_eq!(shown.read_dir().unwrap().count(), 0, "{image}");
        let Err(refused) = made else { panic!("{image} was taken") };
        assert!(refused.kind == ErrorKind::Invalid && refused.hint.is_some(), "{image}: {refused}");
    }
    assert_eq!(state.path().join("state/sandboxes").read_dir().unwrap().count(), 0);
    // One that is as it should be.
    let sandbox = provider.create(&id("box"), FIRST, &spec()).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /etc/ssl/one.pem").await, "pem");
    provider.destroy(&id("box")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_image_has_the_engine_make_folders_in_what_the_host_shares() {
    use std::os::unix::fs::PermissionsExt;
    let (Some(daemon), Some(busybox)) = (Daemon::start().await, needed("busybox")) else { return };
    let docker = daemon.docker().unwrap();
    let mut images = Vec::new();
    for (link, volume) in [
        (None, "/.forkyard"),
        (None, "/.forkyard/run/a/b"),
        (None, "/data/shown/a/b"),
        (None, "/workspace/a/b"),
        (Some(("x", "/.forkyard/run")), "/x/a/b"),
        (Some(("x", "/y/../.forkyard")), "/x/run/a/b"),
        (Some(("x", "/data/shown")), "/x/a/b"),
        (Some(("data", "/.forkyard/run/a")), ""),
        (Some(("etc/ssl", "/.forkyard/run/a/b")), ""),
        (Some(("var", "/.forkyard/run/a/b")), ""),
        (Some((".forkyard/from", "/data/shown/a/b")), ""),
    ] {
        let name = format!("hostile{}:1", images.len());
        make(&docker, &busybox, &name, &[], link).await;
        if !volume.is_empty() {
            changed(&docker, &name, &format!("VOLUME {volume}"), &name).await;
        }
        images.push(name);
    }
    let host = daemon.host();
    let socket = host.trim_start_matches("unix://").to_string();
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    tokio::task::spawn_blocking(move || {
        let env = [("HOSTILE_HOST", host.as_str()), ("HOSTILE_IMAGES", &images.join(" "))];
        as_user_with("docker_hostile::nothing_of_roots_is_left_by", &env, |_| {});
    })
    .await
    .unwrap();
    assert_eq!(left(&daemon).await, (0, 0));
}
/// An image whose links would have the guest's folder lie where commands may write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_with_a_link_in_the_way_of_the_guest_is_refused() {
    let (Some(daemon), Some(busybox)) = (Daemon::start().await, needed("busybox")) else { return };
    let state = tempfile::tempdir().unwrap();
    let provider = connect(&daemon, state.path(), None).await;
    for (link, to, folder) in [(".forkyard", "/x", "x"), (".forkyard/run", "../x", "x")] {
        make(&daemon.docker().unwrap(), &busybox, "linked:1", &[folder], Some((link, to))).await;
        let refused = provider.create(&id("linked"), FIRST, &of("linked:1")).await.err().unwrap();
        assert!(refused.message.contains("in the way of"), "{refused}");
    }
    assert_eq!(left(&daemon).await, (0, 0));
}

/// What an archive holds is not put into whichever image it names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_imported_snapshot_starts_from_no_image_but_the_one_that_is_meant() {
    let Some(daemon) = Daemon::start().await else { return };
    let (state, docker) = (tempfile::tempdir().unwrap(), daemon.docker().unwrap());
    let provider = connect(&daemon, state.path(), None).await;
    changed(&docker, IMAGE, "ENV MARK=private", "private:1").await;
    let sandbox = provider.create(&id("box"), FIRST, &of("private:1")).await.unwrap();
    let (taken, again) = (SnapshotId::new("taken").unwrap(), SnapshotId::new("again").unwrap());
    sandbox.snapshot(&taken, &Labels::new()).await.unwrap();
    let file = state.path().join("exported");
    provider.export_snapshot(&taken, &file).await.unwrap();
    for image in [None, Some("other:1")] {
        let refused = provider.import_snapshot(&again, &file, image).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Denied);
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("--image private:1")), "{refused}");
    }
    assert_eq!(provider.snapshots().await.unwrap().len(), 1);
    provider.import_snapshot(&again, &file, Some("private:1")).await.unwrap();
    let child = SandboxSpec { root: Root::Snapshot(again), ..spec() };
    let child = provider.create(&id("child"), FIRST, &child).await.unwrap();
    assert_eq!(sh(&child, "echo $MARK").await, "private\n");
    for name in ["box", "child"] {
        provider.destroy(&id(name)).await.unwrap();
    }
}

/// Nobody who asks for files comes to the folder that the guest shares with the host, and whatever lies there goes with the
/// sandbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guests_folder_is_closed_and_goes() {
    const DEPTH: usize = 16_000;
    let Some(daemon) = Daemon::start().await else { return };
    let state = tempfile::tempdir().unwrap();
    let provider = connect(&daemon, state.path(), None).await;
    let sandbox: Arc<dyn Sandbox> = provider.create(&id("box"), FIRST, &spec()).await.unwrap();
    sh(&sandbox, "ln -s /.forkyard/run l; ln -s / r").await;
    for path in ["/.forkyard/run/x", "/.forkyard/run/d/x", "l/x", "l/d/x", "r/.forkyard/run/x"] {
        let refused = sandbox.write_file(path, "x".into(), None).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Denied, "{path}: {refused}");
    }
    let run = state.path().join("sandboxes/box/run");
    let mut at = rustix::fs::open(&run, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    for _ in 0..DEPTH {
        rustix::fs::mkdirat(&at, "d", 0o700.into()).unwrap();
        at = rustix::fs::openat(&at, "d", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    }
    provider.destroy(&id("box")).await.unwrap();
    assert!(!run.exists());
}
