//! The server from outside: the real binary over real HTTP.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};

use super::World;

/// Long enough for a loaded machine; a failing test says so instead of hanging.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub struct Server {
    pub child: Child,
    pub url: String,
    pub login: String,
    pub token: String,
    pub http: Client,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already in some tests.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    pub fn start(w: &World) -> Server {
        Server::start_with(w, &["--port", "0"])
    }

    pub fn start_with(w: &World, args: &[&str]) -> Server {
        // Servers of other tests have the same port.
        Server::start_env(w, args, &[("DISABLE_METRICS", "true")])
    }

    /// With standard error kept, if it is to be read as JSON.
    pub fn start_env(w: &World, args: &[&str], env: &[(&str, &str)]) -> Server {
        let stderr =
            if env.contains(&("FORKYARD_LOG_FORMAT", "json")) { Stdio::piped() } else { Stdio::inherit() };
        // Fails only if another test of this process was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut child = Command::new(env!("CARGO_BIN_EXE_forkyard"))
            .args(["serve", "--json", "--root"])
            .arg(w.dir.path())
            .args(args)
            .current_dir(w.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("FORKYARD_HOME", w.home())
            .envs(env.iter().copied())
            .stderr(stderr)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let said: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
        let text = |key: &str| said[key].as_str().unwrap().to_string();
        let token = std::fs::read_to_string(text("token_file")).unwrap();
        // Redirects are looked at, not followed; a connection that the server closed is not used again.
        let http = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(0)
            .build()
            .unwrap();
        Server { child, url: text("url"), login: text("login"), token, http }
    }

    pub fn port(&self) -> String {
        self.url.rsplit(':').next().unwrap().to_string()
    }

    pub async fn send(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        body: Option<Value>,
    ) -> Response {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).timeout(PATIENCE);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        request.send().await.unwrap()
    }

    /// As the owner; the answer has to be of this status.
    pub async fn ask(&self, method: Method, path: &str, body: Option<Value>, status: u16) -> Value {
        let response = self.send(method.clone(), path, Some(&self.token), body).await;
        let got = response.status().as_u16();
        let text = response.text().await.unwrap();
        assert_eq!(got, status, "{method} {path}: {text}");
        serde_json::from_str(&text).unwrap_or(Value::String(text))
    }

    pub async fn get(&self, path: &str) -> Value {
        self.ask(Method::GET, path, None, 200).await
    }

    pub async fn until(&self, path: &str, what: impl Fn(&Value) -> bool) -> Value {
        let since = Instant::now();
        loop {
            let answer = self.get(path).await;
            if what(&answer) {
                return answer;
            }
            assert!(since.elapsed() < PATIENCE, "{path} stays {answer}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn create(w: &World, forks: u32) -> Value {
    json!({
        "repo": w.repo(), "prompt": "add a line", "model": w.model(), "forks": forks,
        "sandbox": { "network": "none" },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_started_watched_and_its_result_taken() {
    let w = World::with_commit();
    let s = Server::start(&w);
    assert_eq!(s.get("/api/v1/ready").await["status"], "ok");
    let mut body = create(&w, 2);
    body["verify"] = "grep -q two a.txt".into();
    let made = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await;
    let run = made["id"].as_str().unwrap().to_string();
    let at = format!("/api/v1/runs/{run}");
    let ended = s.until(&at, |r| r["status"] == "ended").await;
    assert_eq!((ended["outcome"].as_str(), ended["winner"].as_u64()), (Some("success"), Some(1)), "{ended}");
    // The CLI sees it, and the API sees the CLI's.
    assert_eq!(w.json(&["status", &run, "--json"])["outcome"], "success");
    let other = w.ended(&[]);
    assert_eq!(s.get(&format!("/api/v1/runs/{other}")).await["outcome"], "success");
    let listed = s.get("/api/v1/runs?limit=1").await;
    assert_eq!(listed["runs"][0]["id"], other.as_str());
    let next =
        s.get(&format!("/api/v1/runs?limit=1&cursor={}", listed["next_cursor"].as_str().unwrap())).await;
    assert_eq!((next["runs"][0]["id"].as_str(), next["next_cursor"].is_null()), (Some(run.as_str()), true));

    let results = s.get(&format!("{at}/results")).await;
    assert_eq!((results["successful"].as_u64(), results["ranking"][0]["fork"].as_u64()), (Some(2), Some(1)));
    let compared = s.get(&format!("{at}/compare")).await;
    assert_eq!(compared["files"][0]["path"], "a.txt");
    assert_eq!((compared["differing"].as_u64(), compared["same"].as_u64()), (Some(1), Some(0)));
    let diff = s.get(&format!("{at}/forks/1/diff?path=a.txt")).await;
    assert!(diff["patch"].as_str().unwrap().contains("+two"), "{diff}");
    let patch = s.get(&format!("{at}/forks/1/patch")).await;
    std::fs::write(w.dir.path().join("p"), patch.as_str().unwrap()).unwrap();
    w.git(&["apply", "--check", w.dir.path().join("p").to_str().unwrap()]);
    assert_eq!(s.get(&format!("{at}/forks/1/files")).await["files"][0]["change"]["kind"], "modified");
    assert_eq!(s.get(&format!("{at}/forks/1/files/content?path=a.txt")).await, "one\ntwo\n");
    let log = s.get(&format!("{at}/forks/1/logs")).await;
    assert!(log["events"].as_array().unwrap().iter().any(|e| e["type"] == "agent.tool_use"), "{log}");
    assert!(s.get(&format!("{at}/forks/1/checkpoints")).await["checkpoints"].is_array());
    for (path, code) in [
        ("/api/v1/runs/nope", "run_not_found"),
        (&format!("{at}/forks/9"), "fork_not_found"),
        (&format!("{at}/forks/1/files/content?path=nope"), "file_not_found"),
        ("/api/v1/nothing", "not_found"),
    ] {
        assert_eq!(s.ask(Method::GET, path, None, 404).await["error"]["code"], code, "{path}");
    }
    for command in ["pause", "resume", "cancel", "forks/0/cancel"] {
        let answer = s.ask(Method::POST, &format!("{at}/{command}"), None, 409).await;
        assert_eq!(answer["error"]["code"], "ended");
    }
    let deeds = s.get(&format!("/api/v1/audit?target={run}")).await;
    assert_eq!(
        (&deeds["entries"][0]["action"], &deeds["entries"][0]["who"]),
        (&json!("run.create"), &json!("owner"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_makes_one_run() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let send = async |key: &str, body: Value| {
        let request = s.http.post(format!("{}/api/v1/runs", s.url)).bearer_auth(&s.token);
        let response = request.header("idempotency-key", key).json(&body).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let (status, first) = send("a", create(&w, 1)).await;
    assert_eq!(status, 201, "{first}");
    let (status, again) = send("a", create(&w, 1)).await;
    assert_eq!((status, &again["id"]), (200, &first["id"]));
    let (status, other) = send("a", create(&w, 2)).await;
    assert_eq!((status, other["error"]["code"].as_str()), (409, Some("idempotency_key_reused")));
    let (status, _) = send("b", create(&w, 1)).await;
    assert_eq!(status, 201);
    assert_eq!(s.get("/api/v1/runs").await["runs"].as_array().unwrap().len(), 2);
    // Another user's key is another key.
    let other = w.run(&["token", "create", "other", "--scope", "steer"]).stdout;
    let request = s.http.post(format!("{}/api/v1/runs", s.url)).bearer_auth(other.trim());
    let response = request.header("idempotency-key", "a").json(&create(&w, 1)).send().await.unwrap();
    assert_eq!(response.status().as_u16(), 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_named_and_nothing_is_stored() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let outside = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(outside.path(), w.dir.path().join("link")).unwrap();
    let outside = outside.path().to_str().unwrap().to_string();
    let link = w.dir.path().join("link").display().to_string();
    for (field, value, status, code) in [
        ("repo", json!("/etc"), 403, "path_refused"),
        ("repo", json!(outside), 403, "path_refused"),
        ("repo", json!(link), 403, "path_refused"),
        ("repo", json!(format!("{}/../..", w.repo().display())), 403, "path_refused"),
        ("repo", json!("file:///etc"), 403, "path_refused"),
        ("repo", json!("ext::sh -c id"), 422, "invalid"),
        ("repo", json!("--upload-pack=x"), 422, "invalid"),
        ("repo", json!(w.dir.path()), 422, "invalid"),
        ("branch", json!("nope"), 422, "invalid"),
        ("branch", json!("--all"), 422, "invalid"),
        ("model", json!("script:/etc/passwd"), 403, "path_refused"),
        ("model", json!("nonesuch"), 422, "invalid"),
        ("forks", json!(0), 422, "invalid"),
        ("forks", json!(101), 422, "invalid"),
        ("forks", json!(-1), 400, "bad_request"),
        ("prompt", json!(""), 422, "invalid"),
        ("budget_usd", json!(-1), 422, "invalid"),
        ("protect", json!(["["]), 422, "invalid"),
        ("capture", json!(["["]), 422, "invalid"),
        ("agent", json!({ "allowed_tools": ["Foo"] }), 422, "invalid"),
        ("agent", json!({ "disallowed_tools": ["Nope"] }), 422, "invalid"),
        ("timeout_ms", json!(1), 422, "invalid"),
        ("no_such_field", json!(1), 400, "bad_request"),
        ("sandbox", json!({ "image": "archive:/etc/passwd" }), 403, "path_refused"),
        ("sandbox", json!({ "secrets": ["nonesuch"] }), 422, "invalid"),
        ("agent", json!({ "permission_mode": "root" }), 400, "bad_request"),
        ("sandbox", json!({ "volumes": ["/:/host"] }), 400, "bad_request"),
    ] {
        let mut body = create(&w, 1);
        body[field] = value.clone();
        let answer = s.ask(Method::POST, "/api/v1/runs", Some(body), status).await;
        assert_eq!(answer["error"]["code"], code, "{field} = {value}: {answer}");
    }
    for query in ["limit=0", "limit=501", "limit=x", "cursor=x", "nope=1"] {
        let response = s.send(Method::GET, &format!("/api/v1/runs?{query}"), Some(&s.token), None).await;
        assert!(response.status().is_client_error(), "{query}");
    }
    let large = json!({ "repo": "x", "prompt": "x".repeat(3 << 20) });
    assert_eq!(s.ask(Method::POST, "/api/v1/runs", Some(large), 413).await["error"]["code"], "too_large");
    let text =
        s.http.post(format!("{}/api/v1/runs", s.url)).bearer_auth(&s.token).body("{}").send().await.unwrap();
    assert_eq!(text.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(s.get("/api/v1/runs").await["runs"].as_array().unwrap().is_empty());
}

/// Every operation of the description, with its path's names filled in.
async fn operations(s: &Server) -> Vec<(Method, String, Option<String>)> {
    let described: Value =
        s.http.get(format!("{}/api/v1/openapi.json", s.url)).send().await.unwrap().json().await.unwrap();
    let mut all = Vec::new();
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let filled: String = path
                .split('/')
                .map(|part| match part {
                    "{fork}" => "0".to_string(),
                    part if part.starts_with('{') => "nobody".to_string(),
                    part => part.to_string(),
                })
                .collect::<Vec<_>>()
                .join("/");
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let need = &operation["security"][0];
            let sandbox = need.get("sandbox").map(|_| "sandbox");
            let scope = need["token"][0].as_str().or(sandbox).map(Into::into);
            all.push((method, filled, scope));
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn no_operation_is_open_to_a_wrong_token() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let make = |args: &[&str]| {
        let made = w.json(&[&["token", "create", "x", "--json"], args].concat());
        (made["id"].as_str().unwrap().to_string(), made["token"].as_str().unwrap().to_string())
    };
    let mut tokens = BTreeMap::new();
    for scope in ["read", "steer", "admin"] {
        tokens.insert(scope, make(&["--scope", scope]).1);
    }
    let (id, revoked) = make(&["--scope", "admin"]);
    assert_eq!(w.run(&["token", "revoke", &id]).code, 0);
    let (_, expired) = make(&["--scope", "admin", "--expires", "1ms"]);
    let unknown = format!("fy_{}_{}", "0".repeat(12), "0".repeat(64));
    let forged = format!(
        "{}{}",
        &tokens["admin"][..tokens["admin"].len() - 1],
        if tokens["admin"].ends_with('0') { '1' } else { '0' }
    );
    let operations = operations(&s).await;
    assert!(operations.len() > 40, "{}", operations.len());
    // What only a sandbox's token opens, no user's does.
    let rank = |scope: &str| ["read", "steer", "admin", "sandbox"].iter().position(|s| *s == scope).unwrap();
    let mut closed = 0;
    for (method, path, scope) in &operations {
        let at = format!("{method} {path}");
        let code = async |token: Option<&str>| {
            let response = s.send(method.clone(), path, token, None).await;
            let status = response.status().as_u16();
            // Where errors have another's shape, the code is in a header.
            let code = response.headers().get("x-forkyard-code").cloned();
            (status, format!("{code:?} {}", response.text().await.unwrap_or_default()))
        };
        let Some(scope) = scope else {
            let (status, text) = code(None).await;
            let used_link = path == "/login" && status == 400;
            assert!(used_link || !matches!(status, 401 | 403), "{at}: {status} {text}");
            continue;
        };
        closed += 1;
        for (token, expected) in [
            (None, "unauthenticated"),
            (Some(""), "unauthenticated"),
            (Some("nonsense"), "unauthenticated"),
            (Some(unknown.as_str()), "unauthenticated"),
            (Some(forged.as_str()), "unauthenticated"),
            (Some(revoked.as_str()), "token_revoked"),
            (Some(expired.as_str()), "token_expired"),
        ] {
            let (status, text) = code(token).await;
            assert_eq!(status, 401, "{at} {token:?}: {text}");
            assert!(text.contains(expected), "{at} {token:?}: {text}");
        }
        for (have, token) in &tokens {
            // A token that may would do it: only addresses of nothing are tried.
            if rank(have) < rank(scope) {
                let (status, text) = code(Some(token)).await;
                assert_eq!(status, 403, "{at} with {have}: {text}");
                assert!(text.contains("wrong_scope"), "{at} with {have}: {text}");
            } else if path.contains("nobody") {
                let (status, text) = code(Some(token)).await;
                assert!(!matches!(status, 401 | 403 | 500..), "{at} with {have}: {status} {text}");
            }
        }
    }
    assert!(closed > 40, "{closed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_sites_and_rebound_names_are_refused() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let send = async |path: &str, headers: &[(&str, &str)]| {
        let mut request = s.http.get(format!("{}{path}", s.url)).bearer_auth(&s.token);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap().status().as_u16()
    };
    for path in ["/api/v1/runs", "/api/v1/health", "/login?code=x", "/nowhere"] {
        assert_eq!(send(path, &[("host", "evil.example")]).await, 421, "{path}");
        assert_eq!(send(path, &[("origin", "https://evil.example")]).await, 403, "{path}");
        assert_eq!(send(path, &[("origin", "null")]).await, 403, "{path}");
    }
    let port = s.port();
    assert_eq!(
        send(
            "/api/v1/runs",
            &[("host", &format!("localhost:{port}")), ("origin", &format!("http://localhost:{port}"))]
        )
        .await,
        200
    );
    let response = s.http.get(format!("{}/api/v1/runs", s.url)).bearer_auth(&s.token).send().await.unwrap();
    assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    assert!(response.headers().get("access-control-allow-origin").is_none());
    let page = s.http.get(format!("{}/api/v1/docs", s.url)).send().await.unwrap();
    assert!(page.headers()["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
    let page = page.text().await.unwrap();
    assert!(!page.contains("http://") && !page.contains("https://"), "the page loads something: {page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_link_works_once_and_its_cookie_is_for_our_pages_alone() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let mode = std::fs::metadata(w.home().join("api-token")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let response = s.http.get(&s.login).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    let cookie = response.headers()["set-cookie"].to_str().unwrap().to_string();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    assert_eq!(s.http.get(&s.login).send().await.unwrap().status(), StatusCode::UNAUTHORIZED);
    let session = cookie.split(';').next().unwrap().to_string();
    let with = |method: Method, path: &str| {
        s.http.request(method, format!("{}{path}", s.url)).header("cookie", &session)
    };
    let me: Value = with(Method::GET, "/api/v1/session").send().await.unwrap().json().await.unwrap();
    assert_eq!((&me["session"], &me["scope"], &me["name"]), (&json!(true), &json!("admin"), &json!("owner")));
    // What changes something has to come from our own page.
    let link = async |request: reqwest::RequestBuilder| request.send().await.unwrap().status().as_u16();
    assert_eq!(link(with(Method::POST, "/api/v1/login-links")).await, 403);
    assert_eq!(
        link(with(Method::POST, "/api/v1/login-links").header("sec-fetch-site", "cross-site")).await,
        403
    );
    assert_eq!(
        link(with(Method::POST, "/api/v1/login-links").header("sec-fetch-site", "same-origin")).await,
        201
    );
    assert_eq!(link(with(Method::POST, "/api/v1/login-links").header("origin", &s.url)).await, 201);
    // A session is no token, and a token no session.
    let value = session.split_once('=').unwrap().1;
    assert_eq!(s.send(Method::GET, "/api/v1/runs", Some(value), None).await.status().as_u16(), 401);
    let forged = s
        .http
        .get(format!("{}/api/v1/runs", s.url))
        .header("cookie", format!("forkyard_session={}", s.token));
    assert_eq!(link(forged).await, 401);
    assert_eq!(link(with(Method::DELETE, "/api/v1/session").header("origin", &s.url)).await, 204);
    assert_eq!(link(with(Method::GET, "/api/v1/session")).await, 401);
}

#[test]
fn it_does_not_listen_to_strangers_without_tls() {
    let w = World::with_commit();
    for host in ["0.0.0.0", "::", "192.0.2.1"] {
        let ran = w.run(&["serve", "--host", host, "--port", "0"]);
        assert_eq!(ran.code, 2, "{host}: {}{}", ran.stdout, ran.stderr);
        assert!(ran.stderr.contains("--insecure-http"), "{}", ran.stderr);
    }
    let ran = w.run(&["serve", "--host", "nowhere"]);
    assert_eq!(ran.code, 2);
    assert!(!w.home().join("api-token").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn it_speaks_tls() {
    let w = World::with_commit();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (cert, key) = (w.dir.path().join("cert.pem"), w.dir.path().join("key.pem"));
    w.write(&cert, &made.cert.pem());
    w.write(&key, &made.signing_key.serialize_pem());
    let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
    // With TLS it listens to others, too.
    let args = ["--port", "0", "--no-work", "--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key];
    let s = Server::start_with(&w, &args);
    assert!(s.url.starts_with("https://"), "{}", s.url);
    let root = reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap();
    let http = Client::builder().tls_certs_only([root]).build().unwrap();
    let at = format!("https://localhost:{}/api/v1/runs", s.port());
    let response = http.get(&at).bearer_auth(&s.token).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, reqwest::Version::HTTP_2));
    // Without it nothing is said.
    assert!(Client::new().get(at.replace("https", "http")).send().await.is_err());
    for (cert, key) in [(cert, cert), (key, key), ("/nonexistent", key)] {
        let ran = w.run(&["serve", "--port", "0", "--tls-cert", cert, "--tls-key", key]);
        assert_eq!(ran.code, 2, "{}", ran.stderr);
    }
}
