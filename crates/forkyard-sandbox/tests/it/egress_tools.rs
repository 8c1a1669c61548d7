//! Real programs through the proxy: curl by HTTP and SOCKS5, git over HTTPS from git's own server.

use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;

use forkyard_sandbox::egress::{Reason, inside};
use forkyard_sandbox::{EgressFactory, NetworkSpec, PROXY_ADDRESS};
use http_body_util::Full;
use hyper::Response;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::egress_fixture::{Handler, Inside, Net, Origin};

/// The variables and files that a sandbox gets, with the paths and the port of this test.
fn command(net: &Net, sandbox: &Inside, program: &str) -> Command {
    let root = net.state.path().join("root");
    for file in net.proxy.files() {
        let path = root.join(file.path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, &file.data).unwrap();
    }
    let mut command = Command::new(program);
    command.env_clear().env("PATH", std::env::var("PATH").unwrap()).env("HOME", net.state.path());
    command.env("GIT_CONFIG_NOSYSTEM", "1").kill_on_drop(true).stdin(Stdio::null());
    for (name, value) in inside::environment() {
        let value = value.replace(&PROXY_ADDRESS.to_string(), &sandbox.proxy.to_string());
        let value = if value.starts_with("/etc/") { format!("{}{value}", root.display()) } else { value };
        command.env(name, value);
    }
    command
}

async fn run(command: &mut Command) -> (Output, String) {
    let output = command.output().await.unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

#[tokio::test]
async fn curl_works_unconfigured() {
    let net = Net::new();
    let read = net.https("read.test").await;
    let sandbox = net.sandbox(net.allow(&[("read.test:ro", &read)])).await;
    let url = format!("https://read.test:{}/file", read.port());
    let (output, text) = run(command(&net, &sandbox, "curl").args(["-sS", "-f", &url])).await;
    assert!(output.status.success(), "{text}");
    assert_eq!(text, "hello /file");

    let (output, text) =
        run(command(&net, &sandbox, "curl").args(["-sS", "-f", "-d", "secret=1", &url])).await;
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("403"), "{text}");

    let (output, text) = run(command(&net, &sandbox, "curl").args(["-sS", "https://evil.test/"])).await;
    assert!(!output.status.success());
    assert!(text.contains("403"), "{text}");

    let (output, text) = run(command(&net, &sandbox, "curl").args([
        "-sS",
        "-f",
        "--noproxy",
        "",
        "--proxy",
        &format!("socks5h://{}", sandbox.proxy),
        &url,
    ]))
    .await;
    assert!(output.status.success(), "{text}");
    assert_eq!(text, "hello /file");
    assert_eq!(read.requests().len(), 2);
}

/// git's own CGI program behind a web server.
pub fn git_backend(root: &Path) -> Handler {
    let root = root.to_path_buf();
    Arc::new(move |request| {
        let root = root.clone();
        Box::pin(async move {
            let header = |name| {
                request.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_string()
            };
            let mut child = Command::new("git")
                .arg("http-backend")
                .env("GIT_PROJECT_ROOT", &root)
                .env("GIT_HTTP_EXPORT_ALL", "1")
                .env("REMOTE_USER", "anyone")
                .env("REQUEST_METHOD", request.method().as_str())
                .env("PATH_INFO", request.uri().path())
                .env("QUERY_STRING", request.uri().query().unwrap_or_default())
                .env("CONTENT_TYPE", header("content-type"))
                .env("CONTENT_LENGTH", request.body().len().to_string())
                .env("HTTP_CONTENT_ENCODING", header("content-encoding"))
                .env("HTTP_GIT_PROTOCOL", header("git-protocol"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdin = child.stdin.take().unwrap();
            let body = request.into_body();
            tokio::spawn(async move {
                let _ = stdin.write_all(&body).await;
            });
            let output = child.wait_with_output().await.unwrap().stdout;
            let split = output.windows(4).position(|w| w == b"\r\n\r\n").expect("CGI headers");
            let mut response = Response::builder();
            for line in String::from_utf8_lossy(&output[..split]).lines() {
                let (name, value) = line.split_once(": ").unwrap();
                response = match name {
                    "Status" => response.status(value[..3].parse::<u16>().unwrap()),
                    _ => response.header(name, value),
                };
            }
            response.body(Full::new(bytes::Bytes::copy_from_slice(&output[split + 4..]))).unwrap()
        })
    })
}

/// A bare repository with a few commits and a file large enough for chunked bodies.
async fn repository(root: &Path) {
    let script = r#"
        set -e
        git init -q -b main work && cd work
        git config user.email a@b.c && git config user.name n
        for i in $(seq 1 50); do echo "line $i" >> file.txt; git add .; git commit -qm "c$i"; done
        head -c 300000 /dev/urandom > blob.bin; git add .; git commit -qm blob
        cd .. && git clone -q --bare work repo.git && git -C repo.git config http.receivepack true
    "#;
    let status = Command::new("sh").arg("-c").arg(script).current_dir(root).status().await.unwrap();
    assert!(status.success());
}

async fn git_site(net: &Net) -> (tempfile::TempDir, Origin) {
    let root = tempfile::tempdir().unwrap();
    repository(root.path()).await;
    let site = net.https_with("git.test", git_backend(root.path())).await;
    (root, site)
}

#[tokio::test]
async fn git_clones_and_fetches_but_does_not_push_to_a_read_only_host() {
    let net = Net::new();
    let (_root, site) = git_site(&net).await;
    let sandbox = net.sandbox(net.allow(&[("git.test:ro", &site)])).await;
    let work = tempfile::tempdir().unwrap();
    let url = format!("https://git.test:{}/repo.git", site.port());
    let git = |args: &[&str]| {
        let mut command = command(&net, &sandbox, "git");
        command.args(args).current_dir(work.path());
        command
    };
    let (output, text) = run(&mut git(&["clone", "-q", &url, "clone"])).await;
    assert!(output.status.success(), "{text}");
    assert_eq!(std::fs::metadata(work.path().join("clone/blob.bin")).unwrap().len(), 300_000);
    let (output, text) = run(&mut git(&["-C", "clone", "fetch", "-q"])).await;
    assert!(output.status.success(), "{text}");

    let identity = ["-C", "clone", "-c", "user.name=n", "-c", "user.email=a@b.c"];
    let (output, text) =
        run(&mut git(&[&identity[..], &["commit", "-q", "--allow-empty", "-m", "x"]].concat())).await;
    assert!(output.status.success(), "{text}");
    let (output, text) = run(&mut git(&["-C", "clone", "push", "-q", "origin", "main"])).await;
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("403"), "{text}");
    assert!(net.reasons("git.test").contains(&Reason::Push));
    assert!(!site.requests().iter().any(|s| s.path.contains("receive-pack")));
}

#[tokio::test]
async fn git_pushes_to_a_host_that_the_user_opened() {
    let net = Net::new();
    let (_root, site) = git_site(&net).await;
    let sandbox = net.sandbox(net.allow(&[("git.test", &site)])).await;
    let work = tempfile::tempdir().unwrap();
    // Tunnelled: the site's own certificate has to be trusted inside, as in the bundle of a host.
    let bundle = work.path().join("ca.pem");
    std::fs::write(&bundle, &net.world.root_pem).unwrap();
    let script = format!(
        "git clone -q https://git.test:{}/repo.git c && cd c && git -c user.name=n -c user.email=a@b.c commit -q --allow-empty -m x && git push -q origin main:other",
        site.port()
    );
    let mut shell = command(&net, &sandbox, "sh");
    shell.args(["-c", &script]).env("GIT_SSL_CAINFO", &bundle).current_dir(work.path());
    let (output, text) = run(&mut shell).await;
    assert!(output.status.success(), "{text}");
    assert!(site.requests().iter().any(|s| s.path.ends_with("git-receive-pack") && s.method == "POST"));
}

#[tokio::test]
async fn a_wrong_allow_list_is_refused_before_anything_is_served() {
    let net = Net::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = forkyard_core::SandboxId::new("s1").unwrap();
    let spec = NetworkSpec { allow: vec!["https://x.test".into()], ..Default::default() };
    let refused = net.proxy.serve(&id, &spec, None, listener).err().unwrap();
    assert_eq!(refused.kind, forkyard_sandbox::ErrorKind::Invalid);
}
