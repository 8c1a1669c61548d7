//! Secrets of the configuration, seen from the host that they are for: a server of the test that speaks TLS.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use rustls::pki_types::PrivatePkcs8KeyDer;

use super::{Ran, World};

const VALUE: &str = "Bearer s3cret-of-the-vault";

struct Vault {
    port: u16,
    certificate: String,
    /// Path and Authorization of what came.
    seen: Arc<Mutex<Vec<(String, String)>>>,
}

impl Vault {
    /// The world's configuration has a secret for it.
    fn start(w: &World) -> Vault {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![made.cert.der().clone()],
                PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into(),
            )
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (config, log) = (Arc::new(config), seen.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let connection = rustls::ServerConnection::new(config.clone()).unwrap();
                let mut stream = BufReader::new(rustls::StreamOwned::new(connection, stream));
                let mut head = Vec::new();
                while let Ok(1..) = stream.read_until(b'\n', &mut head)
                    && !head.ends_with(b"\r\n\r\n")
                {}
                let head = String::from_utf8(head).unwrap();
                let path = head.split(' ').nth(1).unwrap_or_default().to_string();
                let given = head.lines().find_map(|l| l.strip_prefix("authorization: ")).unwrap_or("none");
                log.lock().unwrap().push((path, given.to_string()));
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nyes";
                // Who asked may be gone.
                let _ = stream.get_mut().write_all(answer);
                stream.get_mut().conn.send_close_notify();
                let _ = stream.get_mut().flush();
            }
        });
        let certificate = w.dir.path().join("vault.pem");
        w.write(&certificate, &made.cert.pem());
        w.user_file(&format!(
            "[secrets.vault]\nheader = \"Authorization\"\nvalue = \"{VALUE}\"\nhosts = [\"127.0.0.1:{port}\"]\n\
             [network]\nallow = [\"127.0.0.1:{port}:ro\"]\n"
        ));
        Vault { port, certificate: certificate.display().to_string(), seen }
    }

    fn run(&self, w: &World, args: &[&str]) -> Ran {
        let ran = w.run_with(args, &[("SSL_CERT_FILE", &self.certificate)]);
        assert_eq!(ran.code, 0, "{args:?}: {}{}", ran.stdout, ran.stderr);
        ran
    }

    /// A command that asks it for something. Addresses of loopback would not go by the proxy else.
    fn ask(&self, what: &str) -> String {
        format!(
            "curl -sS -f -m 60 --noproxy none -x http://127.0.0.1:3128 https://127.0.0.1:{}/{what}",
            self.port
        )
    }

    fn take(&self) -> Vec<(String, String)> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

fn seen(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|(path, given)| (path.to_string(), given.to_string())).collect()
}

#[test]
fn requests_of_setup_and_of_the_agent_carry_it_and_those_of_verify_do_not() {
    let w = World::with_commit();
    let vault = Vault::start(&w);
    w.write(
        &w.script(),
        &format!(
            "name = \"asks\"\n[[turn]]\ntext = \"I ask.\"\n\
             tools = [{{ name = \"Bash\", input = {{ command = \"{} > a.txt; env > env.txt\" }} }}]\n\
             [[turn]]\ntext = \"Done.\"\n",
            vault.ask("agent")
        ),
    );
    let model = w.model();
    let (setup, verify) = (vault.ask("setup"), vault.ask("verify"));
    let args = ["fork", "-p", "ask", "-m", &model, "--setup", &setup, "--verify", &verify, "--json"];
    let ran = vault.run(&w, &[&args[..], &["--secret", "vault"]].concat());
    // Verify sets its own sandboxes up, and may judge the base too.
    let all = seen(&[("/setup", VALUE), ("/agent", VALUE), ("/setup", "none"), ("/verify", "none")]);
    assert_eq!(BTreeSet::from_iter(vault.take()), BTreeSet::from_iter(all));
    let run = serde_json::from_str::<serde_json::Value>(ran.stdout.lines().last().unwrap()).unwrap();
    let diff = w.run(&["diff", &format!("{}/0", run["run"].as_str().unwrap())]).stdout;
    assert!(diff.contains("HTTPS_PROXY") && !diff.contains("s3cret"), "{diff}");

    // A run has what it names.
    vault.run(&w, &args);
    let all = seen(&[("/setup", "none"), ("/agent", "none"), ("/verify", "none")]);
    assert_eq!(BTreeSet::from_iter(vault.take()), BTreeSet::from_iter(all));
}

#[test]
fn a_sandbox_by_hand_has_it_for_as_long_as_it_lives() {
    let w = World::new();
    let vault = Vault::start(&w);
    let ask = |what: &str| vault.ask(what);
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
    let run = |before: &[&str], what: &str| {
        let command = words(&ask(what));
        let args: Vec<&str> = before.iter().copied().chain(command.iter().map(String::as_str)).collect();
        vault.run(&w, &args)
    };
    run(&["sandbox", "run", "--secret", "vault", "--"], "run");
    vault.run(&w, &["sandbox", "create", "--name", "box1", "--secret", "vault"]);
    run(&["sandbox", "exec", "box1", "--"], "exec");
    let child = vault.run(&w, &["sandbox", "fork", "box1"]).stdout;
    run(&["sandbox", "exec", child.trim(), "--"], "child");
    vault.run(&w, &["sandbox", "stop", "box1"]);
    vault.run(&w, &["sandbox", "start", "box1"]);
    run(&["sandbox", "exec", "box1", "--"], "started");
    let all = ["/run", "/exec", "/child", "/started"].map(|path| (path, VALUE));
    assert_eq!(vault.take(), seen(&all));
    run(&["sandbox", "run", "--"], "without");
    assert_eq!(vault.take(), seen(&[("/without", "none")]));

    // Only its name is written down.
    let record = std::fs::read_dir(w.home().join("sandboxes/sandboxes/box1")).unwrap().flatten();
    let texts: Vec<_> = record.filter_map(|e| std::fs::read_to_string(e.path()).ok()).collect();
    assert!(
        texts.iter().any(|t| t.contains("vault")) && !texts.iter().any(|t| t.contains("s3cret")),
        "{texts:?}"
    );

    // Whoever took it out of the configuration can still get at the files.
    w.user_file("");
    assert_eq!(vault.run(&w, &["sandbox", "exec", "box1", "--", "echo", "there"]).stdout, "there\n");
    let ran = w.run(&["sandbox", "create", "--secret", "vault"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(ran.stderr.contains("--secret vault: there is no such secret"), "{}", ran.stderr);
}
