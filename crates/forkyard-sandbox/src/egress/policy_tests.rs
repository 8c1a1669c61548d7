use super::*;
use hyper::Method;

fn policy(mode: NetworkMode, allow: &[&str]) -> Policy {
    let spec =
        NetworkSpec { mode, allow: allow.iter().map(|s| s.to_string()).collect(), ..Default::default() };
    Policy::new(&spec, &BTreeMap::new()).unwrap()
}

fn secret(hosts: &[&str], methods: &[&str], prefixes: &[&str]) -> Secret {
    let strings = |s: &[&str]| s.iter().map(|s| s.to_string()).collect();
    Secret {
        header: "Authorization".into(),
        value: "Bearer s3cret".into(),
        hosts: strings(hosts),
        methods: strings(methods),
        path_prefixes: strings(prefixes),
    }
}

/// A sandbox with that one secret.
fn alone(secret: Secret) -> (NetworkSpec, BTreeMap<String, Secret>) {
    let spec = NetworkSpec { secrets: vec!["s".into()], ..Default::default() };
    (spec, [("s".to_string(), secret)].into())
}

fn verdict(policy: &Policy, host: &str, port: u16) -> Result<(Access, Reason), Reason> {
    policy.judge(&Host::parse(host).unwrap(), port).map(|g| (g.access, g.reason)).map_err(|r| r.reason)
}

fn facts<'a>(method: &'a Method, path: &'a str) -> RequestFacts<'a> {
    RequestFacts { method, path, query: None, content_type: None, has_body: false, tls: true }
}

#[test]
fn the_default_list_parses_and_is_read_only() {
    let p = policy(NetworkMode::Isolated, &[]);
    assert!(default_hosts().count() > 20);
    assert_eq!(verdict(&p, "github.com", 443), Ok((Access::ReadOnly, Reason::DefaultList)));
    assert_eq!(verdict(&p, "GITHUB.com.", 80), Ok((Access::ReadOnly, Reason::DefaultList)));
    assert_eq!(verdict(&p, "github.com", 22), Err(Reason::Port));
    assert_eq!(verdict(&p, "evil.github.com", 443), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "github.com.evil.example", 443), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "1.1.1.1", 443), Err(Reason::NotListed));
    let none = NetworkSpec { no_default_allow: true, ..Default::default() };
    assert_eq!(
        verdict(&Policy::new(&none, &BTreeMap::new()).unwrap(), "github.com", 443),
        Err(Reason::NotListed)
    );
}

#[test]
fn modes_differ_as_designed() {
    let none = policy(NetworkMode::None, &["example.com"]);
    assert_eq!(verdict(&none, "example.com", 443), Err(Reason::NoNetwork));
    assert_eq!(verdict(&none, "github.com", 443), Err(Reason::NoNetwork));
    let bridge = policy(NetworkMode::Bridge, &["ro.example:ro"]);
    assert_eq!(verdict(&bridge, "anything.example", 22), Ok((Access::Open, Reason::Bridge)));
    assert_eq!(verdict(&bridge, "github.com", 443), Ok((Access::Open, Reason::Bridge)));
    assert_eq!(verdict(&bridge, "ro.example", 443), Ok((Access::ReadOnly, Reason::UserList)));
}

#[test]
fn entries_mean_what_they_say() {
    let p = policy(
        NetworkMode::Isolated,
        &[
            "a.example",
            "*.b.example",
            "c.example:8443",
            "d.example:ro",
            "e.example:8080:ro",
            "10.1.0.0/16",
            "github.com",
        ],
    );
    let open = Ok((Access::Open, Reason::UserList));
    let read = Ok((Access::ReadOnly, Reason::UserList));
    assert_eq!(verdict(&p, "a.example", 443), open);
    assert_eq!(verdict(&p, "a.example", 8080), Err(Reason::Port));
    assert_eq!(verdict(&p, "x.a.example", 443), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "x.b.example", 443), open);
    assert_eq!(verdict(&p, "x.y.b.example", 80), open);
    assert_eq!(verdict(&p, "b.example", 443), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "xb.example", 443), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "c.example", 8443), open);
    assert_eq!(verdict(&p, "c.example", 443), Err(Reason::Port));
    assert_eq!(verdict(&p, "d.example", 443), read);
    assert_eq!(verdict(&p, "e.example", 8080), read);
    assert_eq!(verdict(&p, "10.1.2.3", 443), open);
    assert_eq!(verdict(&p, "10.2.2.3", 443), Err(Reason::NotListed));
    // The user's word is wider than the default list's.
    assert_eq!(verdict(&p, "github.com", 443), open);
    assert_eq!(p.named_ranges(443), ["10.1.0.0/16".parse().unwrap()]);
    let p = policy(NetworkMode::Isolated, &["127.0.0.1:5000"]);
    assert_eq!(p.named_ranges(5000).len(), 1);
    assert_eq!(p.named_ranges(443), [], "one port of an address opens no other");
}

#[test]
fn the_widest_word_of_the_user_wins() {
    let p = policy(NetworkMode::Isolated, &["*.x.example:ro", "api.x.example"]);
    assert_eq!(verdict(&p, "api.x.example", 443), Ok((Access::Open, Reason::UserList)));
    assert_eq!(verdict(&p, "www.x.example", 443), Ok((Access::ReadOnly, Reason::UserList)));
}

#[test]
fn bad_entries_are_refused_with_a_hint() {
    for bad in [
        "",
        "*",
        "*.",
        "*.com",
        "*.1.2.3.4",
        "https://x.example",
        "x.example/path",
        "x.example:0x50",
        "x.example:rw",
        "a b",
        "10.0.0.0/40",
        "0177.0.0.1",
        "2130706433",
        "x.*.example",
        "10.0.0.0/8:x",
    ] {
        let e = Rule::parse(bad).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Invalid, "{bad}");
        assert!(e.hint.is_some(), "{bad}");
    }
    for good in
        ["x.example", "*.x.example:ro", "[::1]:80", "::1", "fd00::/8", "10.0.0.0/8:5432:ro", "1.2.3.4:80"]
    {
        Rule::parse(good).unwrap();
    }
}

#[test]
fn read_only_means_get_head_and_fetch() {
    let grant = policy(NetworkMode::Isolated, &[]).judge(&Host::parse("github.com").unwrap(), 443).unwrap();
    let judge = |f: RequestFacts<'_>| grant.judge(&f).map(|s| s.len()).map_err(|r| r.reason);
    assert_eq!(judge(facts(&Method::GET, "/a/b")), Ok(0));
    assert_eq!(judge(facts(&Method::HEAD, "/a/b")), Ok(0));
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS, Method::TRACE] {
        assert_eq!(judge(facts(&method, "/a/b")), Err(Reason::ReadOnly), "{method}");
    }
    assert_eq!(judge(RequestFacts { has_body: true, ..facts(&Method::GET, "/") }), Err(Reason::ReadOnly));

    let fetch = |path| RequestFacts {
        content_type: Some(b"application/x-git-upload-pack-request"),
        has_body: true,
        ..facts(&Method::POST, path)
    };
    assert_eq!(judge(fetch("/a/b.git/git-upload-pack")), Ok(0));
    for path in [
        "/a/b.git/git-upload-pack/x",
        "/gists%2fgit-upload-pack",
        "/a/../git-upload-pack",
        "/a/%2e%2e/git-upload-pack",
        "/x-git-upload-pack",
    ] {
        assert_eq!(judge(fetch(path)), Err(Reason::ReadOnly), "{path}");
    }
    assert_eq!(
        judge(RequestFacts { query: Some("a"), ..fetch("/a/git-upload-pack") }),
        Err(Reason::ReadOnly)
    );
    assert_eq!(
        judge(RequestFacts { content_type: Some(b"text/plain"), ..fetch("/a/git-upload-pack") }),
        Err(Reason::ReadOnly)
    );
    assert_eq!(judge(facts(&Method::POST, "/a/git-receive-pack")), Err(Reason::Push));
    let refs =
        RequestFacts { query: Some("service=git-receive-pack"), ..facts(&Method::GET, "/a/info/refs") };
    assert_eq!(judge(refs), Err(Reason::Push));
}

#[test]
fn secrets_go_only_where_they_are_bound() {
    let known = ["mine", "others"]
        .map(|name| (name.to_string(), secret(&[&format!("{name}.example")], &["post"], &["/v1/repos/me"])));
    let spec = NetworkSpec { secrets: vec!["mine".into()], ..Default::default() };
    let p = Policy::new(&spec, &known.into()).unwrap();
    assert_eq!(verdict(&p, "mine.example", 443), Ok((Access::ReadOnly, Reason::Secret)));
    // Not over plain HTTP's port, and to nobody else.
    assert_eq!(verdict(&p, "mine.example", 80), Err(Reason::NotListed));
    assert_eq!(verdict(&p, "others.example", 443), Err(Reason::NotListed));
    assert!(p.judge(&Host::parse("github.com").unwrap(), 443).unwrap().secrets.is_empty());

    let grant = p.judge(&Host::parse("mine.example").unwrap(), 443).unwrap();
    assert!(grant.terminated());
    let count = |f: RequestFacts<'_>| grant.judge(&f).map(|s| s.len()).map_err(|r| r.reason);
    assert_eq!(count(facts(&Method::POST, "/v1/repos/me")), Ok(1));
    assert_eq!(count(facts(&Method::POST, "/v1/repos/me/x")), Ok(1));
    assert_eq!(count(facts(&Method::GET, "/v1/repos/me/x")), Ok(0));
    for path in [
        "/v1/repos/men",
        "/v1/repos",
        "/v1/repos/me/../you",
        "/v1/repos/me/%2e%2e/you",
        "/v1/repos/me%2fx",
        "/v1/repos/me//x",
        "/v1/repos/me/..;/x",
    ] {
        assert_eq!(count(facts(&Method::POST, path)), Err(Reason::ReadOnly), "{path}");
    }
    // Never in the clear.
    let clear = RequestFacts { tls: false, ..facts(&Method::POST, "/v1/repos/me") };
    assert_eq!(count(clear), Err(Reason::ReadOnly));
}

#[test]
fn secrets_never_show() {
    let (spec, known) = alone(secret(&["x.example"], &[], &[]));
    assert!(!format!("{known:?}").contains("s3cret"));
    let mut headers = hyper::HeaderMap::new();
    Policy::new(&spec, &known).unwrap().secrets[0].put_in(&mut headers);
    assert!(!format!("{headers:?}").contains("s3cret"));
    assert_eq!(headers["authorization"], "Bearer s3cret");
}

#[test]
fn bad_secrets_are_refused() {
    let refused = |s: Secret| {
        let (spec, known) = alone(s);
        let e = Policy::new(&spec, &known).err().expect("refused");
        assert_eq!(e.kind, ErrorKind::Invalid);
        assert!(!e.to_string().contains("s3cret"), "{e}");
    };
    refused(secret(&[], &[], &[]));
    refused(secret(&["*"], &[], &[]));
    refused(secret(&["x.example"], &[], &["v1"]));
    refused(Secret { header: "a b".into(), ..secret(&["x.example"], &[], &[]) });
    refused(Secret { value: "s3cret\r\nX: y".into(), ..secret(&["x.example"], &[], &[]) });
}
