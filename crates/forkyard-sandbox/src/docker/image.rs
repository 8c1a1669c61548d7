//! Images: found, pulled or loaded, and prepared once.
//!
//! A fresh volume takes the owner of the folder that it covers in the image. So each image gets a thin layer on top with
//! /workspace and /home/user owned by the sandbox's user and that user in /etc/passwd; it is kept under a tag of our own and
//! shared by all sandboxes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use bollard::models::{ContainerConfig, ContainerCreateBody};
use bollard::query_parameters::{
    CommitContainerOptionsBuilder, ContainerArchiveInfoOptionsBuilder, CreateContainerOptionsBuilder,
    CreateImageOptionsBuilder, DownloadFromContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListImagesOptions, RemoveContainerOptionsBuilder, RemoveImageOptionsBuilder, TagImageOptionsBuilder,
    UploadToContainerOptionsBuilder,
};
use bollard::{Docker, body_full};
use forkyard_core::SnapshotId;
use futures::StreamExt;

use super::archive::{Parts, single_file};
use super::container::{self, HOME_DIR, LABEL_ID, LABEL_INFO, LABEL_MAKER, LABEL_OWNER, WORKSPACE};
use super::engine::{gone_is_ok, is_conflict, is_missing, translate};
use super::lifecycle::token;
use super::record::{Home, MadeImage, digest, maker};
use super::{Inner, load};
use crate::{ErrorKind, Result, Root, SandboxError, UnusedImage, Volume};

/// Raised when the layer on top changes, or what is remembered of it.
const PREPARED_VERSION: u32 = 2;
const PREPARED_REPO: &str = "forkyard-prepared";
/// Images of archives have no name of their own; this one keeps them.
const LOADED_REPO: &str = "forkyard-loaded";
/// Each is a mount of its own; images name one or two.
const MAX_IMAGE_VOLUMES: usize = 32;
/// Folders around a volume, of each of which the engine is asked.
const MAX_VOLUME_DEPTH: usize = 16;
/// A prepared image that was not used for so long is made again when it is wanted: that takes about a second.
const KEEP_UNUSED: Duration = Duration::from_secs(24 * 3600);
/// Of /etc/passwd and /etc/group.
const MAX_ACCOUNT_BYTES: u64 = 1 << 20;

/// An image that sandboxes can start from.
#[derive(Clone)]
pub struct Prepared {
    pub id: String,
    /// Variables that the image sets.
    pub env: Vec<String>,
    /// Folders that it says are volumes.
    pub volumes: Vec<String>,
    /// Where these lead in it, and whatever else something is mounted on in every sandbox.
    pub leads: BTreeMap<String, String>,
}

/// What a root names, as the engine's image reference. Archives are loaded on the way.
pub async fn reference(docker: &Docker, home: &Home, root: &Root, default: &str) -> Result<String> {
    match root {
        Root::Default => Ok(default.to_string()),
        Root::Image(image) => match image.split_once(':') {
            Some(("archive", path)) => {
                let id = load::archive(docker, Path::new(path)).await?;
                let name = digest(id.as_bytes());
                // From now on no sweep takes it away.
                let _lock = home.lock_image(&name).await?;
                home.use_image(&name)?;
                let options = TagImageOptionsBuilder::default().repo(LOADED_REPO).tag(&name).build();
                docker.tag_image(&id, Some(options)).await.map_err(|e| translate(&id, &e))?;
                Ok(id)
            }
            Some(("oci", _)) => {
                Err(SandboxError::new(ErrorKind::Unsupported, "the Docker provider can't read an OCI layout")
                    .hint("use an archive (docker save) or a registry reference, or the local provider"))
            }
            Some(_) | None => Ok(image.clone()),
        },
        Root::Directory(path) => Err(SandboxError::new(
            ErrorKind::Unsupported,
            format!("the Docker provider can't use the directory {path} as a root"),
        )
        .hint("use the local provider, or make an image of it: tar -C DIR -c . | docker import - NAME")),
        Root::Snapshot(_) => Err(SandboxError::new(ErrorKind::Invalid, "a snapshot has an image of its own")),
    }
}

/// The image with our layer on top; pulled and made if it is not there.
pub async fn prepare(inner: &Inner, image: &str) -> Result<Prepared> {
    let Inner { docker, home, owner, user, .. } = inner;
    let found = match docker.inspect_image(image).await {
        Ok(found) => found,
        Err(fault) if is_missing(&fault) => {
            pull(docker, image).await?;
            docker.inspect_image(image).await.map_err(|e| translate(image, &e))?
        }
        Err(fault) => return Err(translate(image, &fault)),
    };
    let config = found.config.unwrap_or_default();
    let (env, volumes) = (config.env.unwrap_or_default(), volumes(&config.volumes.unwrap_or_default())?);
    let base = found.id.unwrap_or_else(|| image.to_string());
    let mut targets = container::targets(&inner.files);
    // Of each install its own: none can tell what another one has made.
    let made_of = format!("{PREPARED_VERSION} {owner} {base} {user:?} {targets:?}");
    let name = digest(made_of.as_bytes());
    // Two processes would make two, of which one keeps no name: nobody would find it again.
    let _lock = home.lock_image(&name).await?;
    // Before it is looked for: from now on no sweep takes it away.
    if let Some(MadeImage { id, leads }) = home.use_image(&name)? {
        match docker.inspect_image(&id).await {
            Ok(_) => return Ok(Prepared { id, env, volumes, leads }),
            Err(fault) if is_missing(&fault) => {}
            Err(fault) => return Err(translate(image, &fault)),
        }
    }
    // Made by a process that did not live to write that down: once the next one has the name, it would have none.
    untag(docker, &format!("{PREPARED_REPO}:{name}")).await?;
    let container = unstarted(docker, owner, &base).await?;
    targets.extend(volumes.iter().cloned());
    let made = async {
        let id = add_layer(docker, &container, &name, *user).await?;
        // The layer may have put a folder where there was a link.
        let leads = lead(docker, &container, targets).await?;
        Ok(MadeImage { id, leads })
    };
    let made = made.await;
    let removed = remove(docker, &container).await;
    let made = made?;
    removed?;
    home.made_image(&name, &made)?;
    Ok(Prepared { id: made.id, env, volumes, leads: made.leads })
}

/// A container to look into, and to put a layer on.
async fn unstarted(docker: &Docker, owner: &str, image: &str) -> Result<String> {
    let body = ContainerCreateBody {
        image: Some(image.to_string()),
        // Never started; the engine wants a command all the same.
        entrypoint: Some(vec!["/".into()]),
        // All of ours: an image's own would make it somebody's sandbox.
        labels: Some(
            [(LABEL_OWNER, owner), (LABEL_MAKER, &maker()), (LABEL_ID, ""), (LABEL_INFO, "")]
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .into(),
        ),
        ..Default::default()
    };
    let options =
        CreateContainerOptionsBuilder::default().name(&container::preparing(owner, &token()?)).build();
    Ok(docker.create_container(Some(options), body).await.map_err(|e| translate(image, &e))?.id)
}

async fn remove(docker: &Docker, container: &str) -> Result<()> {
    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
    gone_is_ok(container, docker.remove_container(container, Some(options)).await)
}

/// Where each of these paths leads in what a container starts from. It goes on from what is not there as if there were folders.
async fn lead(docker: &Docker, container: &str, paths: Vec<String>) -> Result<BTreeMap<String, String>> {
    let mut leads = BTreeMap::new();
    for path in paths {
        let (mut asked, mut at) = (PathBuf::from("/"), PathBuf::from("/"));
        let mut parts = Path::new(&path).components().skip(1);
        while let Some(part) = parts.next() {
            // Not of where it has led so far: a name there need not be text, and its answers are.
            asked.push(part);
            at.push(part);
            let path = asked.to_string_lossy();
            let options = ContainerArchiveInfoOptionsBuilder::default().path(&path).build();
            match docker.get_container_archive_info(container, Some(options)).await {
                // The engine has followed it, and whatever it leads to, to the end.
                Ok(found) if !found.link_target.is_empty() => at = PathBuf::from(found.link_target),
                Ok(_) => {}
                Err(fault) if is_missing(&fault) => {
                    at.extend(parts);
                    break;
                }
                Err(fault) => return Err(translate(&path, &fault)),
            }
        }
        leads.insert(path, at.display().to_string());
    }
    Ok(leads)
}

/// The engine follows links of the image to where it mounts a folder of the host, and makes what is missing there: as root, and in
/// another folder of the host if that is where they lead.
pub async fn check_links(inner: &Inner, image: &Prepared, volumes: &[Volume]) -> Result<()> {
    if volumes.is_empty() {
        return Ok(());
    }
    let Inner { docker, owner, .. } = inner;
    let container = unstarted(docker, owner, &image.id).await?;
    let leads = lead(docker, &container, volumes.iter().map(|volume| volume.path.clone()).collect()).await;
    let removed = remove(docker, &container).await;
    if let Some((path, leads)) = leads?.iter().find(|(path, leads)| path != leads) {
        let what = format!("volumes: in this image a link makes {leads} of {path}");
        return Err(SandboxError::new(ErrorKind::Invalid, what)
            .hint("name that path itself, or one without links, like /data"));
    }
    removed
}

/// As the engine will have them. It mounts a relative one where its words lead then, and not where they seem to.
fn volumes(named: &[String]) -> Result<Vec<String>> {
    let refused = |what: String, fix: &str| Err(SandboxError::new(ErrorKind::Invalid, what).hint(fix));
    if named.len() > MAX_IMAGE_VOLUMES {
        let what = format!("the image names {} volumes, at most {MAX_IMAGE_VOLUMES} are taken", named.len());
        return refused(what, "use an image that names fewer");
    }
    let mut plain = BTreeSet::new();
    for path in named {
        if !path.starts_with('/') {
            let what = format!("the image names a volume {path:?}, which is not an absolute path");
            return refused(what, "use an image whose volumes are");
        }
        let mut whole = PathBuf::from("/");
        for part in Path::new(path).components() {
            match part {
                Component::Normal(part) => whole.push(part),
                Component::ParentDir => _ = whole.pop(),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
        if whole.components().skip(1).count() > MAX_VOLUME_DEPTH {
            let what = format!("the image names a volume that lies deeper than {MAX_VOLUME_DEPTH} folders");
            return refused(what, "use an image whose volumes do not");
        }
        plain.insert(whole.display().to_string());
    }
    Ok(plain.into_iter().collect())
}

/// Tags of images that we loaded or prepared, that nobody has used for a while and that no container stands on, nor another image
/// or, apart from some, a snapshot.
pub async fn unused(
    docker: &Docker,
    home: &Home,
    age: Duration,
    without: &[SnapshotId],
) -> Result<Vec<UnusedImage>> {
    let options = ListContainersOptionsBuilder::default().all(true).build();
    let containers = docker.list_containers(Some(options)).await.map_err(|e| translate("containers", &e))?;
    let mut in_use: BTreeSet<String> = containers.into_iter().filter_map(|c| c.image_id).collect();
    let mut repos = vec![PREPARED_REPO];
    match home.stand_on(without) {
        Ok(images) => {
            in_use.extend(images);
            repos.push(LOADED_REPO);
        }
        // Any of those may be what it starts from, and could not be had again.
        Err(e) => tracing::warn!(error = %e, "images of archives stay: what starts from them can't be told"),
    }
    let found = docker.list_images(None::<ListImagesOptions>).await.map_err(|e| translate("images", &e))?;
    // Without its name the engine would keep it all the same, and nobody would find it once it is free.
    in_use.extend(found.iter().map(|image| image.parent_id.clone()));
    let mut unused = Vec::new();
    for image in found.iter().filter(|image| !in_use.contains(&image.id)) {
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(image.created).unwrap_or(0));
        for tag in &image.repo_tags {
            let Some((repo, digest)) = tag.split_once(':').filter(|(repo, _)| repos.contains(repo)) else {
                continue;
            };
            if !is_unused(home, digest, made, age) {
                continue;
            }
            let bytes = match repo {
                // By another name it stays.
                LOADED_REPO if image.repo_tags.len() == 1 => u64::try_from(image.size).unwrap_or(0),
                // A layer of a few folders: nothing beside the image under it, which is the engine's.
                _ => 0,
            };
            unused.push(UnusedImage { name: tag.clone(), bytes });
        }
    }
    unused.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(unused)
}

/// `made`: where nothing says when it was used.
fn is_unused(home: &Home, digest: &str, made: SystemTime, age: Duration) -> bool {
    let used = home.image_used(digest).unwrap_or(made);
    used.elapsed().is_ok_and(|since| since >= age.max(KEEP_UNUSED))
}

/// Removes those; says which it did. The engine keeps one that a container has come to stand on meanwhile.
pub async fn sweep(
    docker: &Docker,
    home: &Home,
    age: Duration,
    without: &[SnapshotId],
) -> Result<Vec<UnusedImage>> {
    let mut removed = Vec::new();
    for image in unused(docker, home, age, without).await? {
        let digest = image.name.rsplit(':').next().unwrap_or_default();
        // Somebody is about to use one whose lock is held, or has begun to since it was looked at.
        let Some(_lock) = home.try_lock_image(digest)? else { continue };
        if !is_unused(home, digest, SystemTime::UNIX_EPOCH, age) {
            continue;
        }
        if untag(docker, &image.name).await? {
            home.forget_image(digest)?;
            removed.push(image);
        }
    }
    Ok(removed)
}

/// Takes a name from an image, which goes with its last one. Whether it is gone: the engine keeps what a container stands on.
async fn untag(docker: &Docker, tag: &str) -> Result<bool> {
    // What it was made from is not ours to remove.
    let options = RemoveImageOptionsBuilder::default().noprune(true).build();
    match docker.remove_image(tag, Some(options), None).await {
        Ok(_) => Ok(true),
        Err(fault) if is_missing(&fault) => Ok(true),
        Err(fault) if is_conflict(&fault) => Ok(false),
        Err(fault) => Err(translate(tag, &fault)),
    }
}

async fn pull(docker: &Docker, image: &str) -> Result<()> {
    // Without a tag the engine would pull every one there is.
    let tagged = image.contains('@') || image.rsplit('/').next().is_some_and(|last| last.contains(':'));
    let name = if tagged { image.to_string() } else { format!("{image}:latest") };
    let options = CreateImageOptionsBuilder::default().from_image(&name).build();
    let mut answers = Box::pin(docker.create_image(Some(options), None, None));
    while let Some(answer) = answers.next().await {
        answer.map_err(|fault| {
            let error = translate(image, &fault);
            // A registry that says 404 has no such image; one that can't be reached may have.
            match error.kind {
                ErrorKind::Auth => error.hint(format!(
                    "`docker login` if you have not, then `docker pull {name}`: Forkyard passes no login on, and uses what the engine has"
                )),
                ErrorKind::NotFound => SandboxError::new(ErrorKind::Invalid, error.message)
                    .hint("check the image's name and tag"),
                _ if error.hint.is_none() => {
                    error.hint("can the engine reach the registry? docker load or docker import also work")
                }
                _ => error,
            }
        })?;
    }
    Ok(())
}

/// Returns the image's id.
async fn add_layer(docker: &Docker, container: &str, name: &str, (uid, gid): (u32, u32)) -> Result<String> {
    let broken = |e: std::io::Error| SandboxError::new(ErrorKind::Unavailable, format!("image layer: {e}"));
    let passwd = account_file(docker, container, "/etc/passwd").await?;
    let group = account_file(docker, container, "/etc/group").await?;
    let mut parts = Parts::new();
    let home = HOME_DIR.trim_start_matches('/');
    let mut fill = || -> std::io::Result<()> {
        parts.dir("etc", 0, 0, 0o755)?;
        parts.file(
            "etc/passwd",
            &with_entry(&passwd, &format!("user:x:{uid}:{gid}::{HOME_DIR}:/bin/sh")),
            0o644,
        )?;
        parts.file("etc/group", &with_entry(&group, &format!("user:x:{gid}:")), 0o644)?;
        // A volume takes its mode from here too.
        parts.dir("tmp", 0, 0, 0o1777)?;
        parts.dir("home", 0, 0, 0o755)?;
        parts.dir(home, uid, gid, 0o755)?;
        parts.dir(WORKSPACE.trim_start_matches('/'), uid, gid, 0o755)
    };
    fill().map_err(broken)?;
    let data = parts.finish().map_err(broken)?;
    let options = UploadToContainerOptionsBuilder::default().path("/").build();
    docker
        .upload_to_container(container, Some(options), body_full(data.into()))
        .await
        .map_err(|e| translate("image layer", &e))?;
    let options = CommitContainerOptionsBuilder::default();
    let options = options.container(container).repo(PREPARED_REPO).tag(name).build();
    let made = docker.commit_container(options, ContainerConfig::default()).await;
    Ok(made.map_err(|e| translate("image layer", &e))?.id)
}

/// Empty if the image has none.
async fn account_file(docker: &Docker, container: &str, path: &str) -> Result<Vec<u8>> {
    let options = DownloadFromContainerOptionsBuilder::default().path(path).build();
    let mut stream = Box::pin(docker.download_from_container(container, Some(options)));
    let mut archive = Vec::new();
    while let Some(piece) = stream.next().await {
        match piece {
            Ok(piece) => archive.extend_from_slice(&piece),
            Err(fault) if is_missing(&fault) => return Ok(Vec::new()),
            Err(fault) => return Err(translate(path, &fault)),
        }
        if archive.len() as u64 > 2 * MAX_ACCOUNT_BYTES {
            return Err(SandboxError::new(ErrorKind::Invalid, format!("{path} of the image is too large")));
        }
    }
    single_file(&archive, MAX_ACCOUNT_BYTES)
        .map_err(|e| SandboxError::new(ErrorKind::Invalid, format!("{path} of the image: {e}")))
}

/// Puts ours first, so that it is the name of that number; others of that number stay as further names.
fn with_entry(file: &[u8], entry: &str) -> Vec<u8> {
    let taken = format!("{}:", entry.split(':').next().unwrap_or_default());
    let mut out = format!("{entry}\n").into_bytes();
    for line in file.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
        if !line.starts_with(taken.as_bytes()) {
            out.extend_from_slice(line);
            out.push(b'\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_added_once_and_first() {
        let file = b"root:x:0:0::/root:/bin/sh\nuser:x:5:5::/x:/y\nnode:x:1000:1000::/home/node:/bin/sh";
        let text = String::from_utf8(with_entry(file, "user:x:1000:1000::/home/user:/bin/sh")).unwrap();
        assert_eq!(
            text,
            "user:x:1000:1000::/home/user:/bin/sh\nroot:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"
        );
    }
}
