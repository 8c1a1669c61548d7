//! Tokens, sessions and the audit trail.

use std::future::Future;
use std::sync::Arc;

use forkyard_core::Timestamp;
use serde_json::json;

use crate::*;

fn token(id: &str, parent: Option<&str>) -> Token {
    Token {
        id: id.into(),
        parent: parent.map(Into::into),
        name: "somebody's \u{1f511}".into(),
        scope: Scope::Steer,
        hash: "00ff".into(),
        created_at: Timestamp(1000),
        expires_at: Some(Timestamp(2000)),
        revoked_at: None,
    }
}

pub async fn tokens_are_kept_and_revoked<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    assert_eq!(store.token("a").await, Ok(None));
    store.put_token(token("a", None)).await.unwrap();
    store.put_token(token("s", Some("a"))).await.unwrap();
    store.put_token(Token { expires_at: None, ..token("b", None) }).await.unwrap();
    assert!(matches!(store.put_token(token("a", None)).await, Err(StoreError::Invalid(_))), "taken");
    assert!(matches!(store.put_token(token("", None)).await, Err(StoreError::Invalid(_))), "no id");
    assert_eq!(store.token("a").await, Ok(Some(token("a", None))));
    store.revoke_token("a", Timestamp(1500)).await.unwrap();
    store.revoke_token("a", Timestamp(1600)).await.unwrap();
    let revoked: Vec<(String, Option<Timestamp>)> =
        store.tokens().await.unwrap().into_iter().map(|t| (t.id, t.revoked_at)).collect();
    let at = Some(Timestamp(1500));
    assert_eq!(revoked, [("a".to_string(), at), ("b".to_string(), None), ("s".to_string(), at)]);
    assert!(matches!(store.revoke_token("x", Timestamp(1)).await, Err(StoreError::NotFound { .. })));
}

pub async fn old_sessions_are_forgotten<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    store.put_token(token("a", None)).await.unwrap();
    store.put_token(token("s", Some("a"))).await.unwrap();
    store.put_token(Token { created_at: Timestamp(2001), ..token("later", Some("a")) }).await.unwrap();
    let left: Vec<String> = store.tokens().await.unwrap().into_iter().map(|t| t.id).collect();
    assert_eq!(left, ["a", "later"]);
}

pub async fn what_is_over_is_forgotten_in_time<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let lasting = |id: &str, parent| Token { expires_at: None, ..token(id, parent) };
    for t in [
        lasting("lasting", None),
        lasting("revoked", None),
        lasting("revoked-later", None),
        token("expired", None),
        Token { expires_at: Some(Timestamp(4000)), ..token("valid", None) },
        lasting("of-lasting", Some("lasting")),
        lasting("of-expired", Some("expired")),
    ] {
        store.put_token(t).await.unwrap();
    }
    store.revoke_token("revoked", Timestamp(1500)).await.unwrap();
    store.revoke_token("revoked-later", Timestamp(3500)).await.unwrap();
    assert_eq!(store.forget_tokens(Timestamp(1500)).await, Ok(0), "of that very time");
    assert_eq!(store.forget_tokens(Timestamp(3000)).await, Ok(3));
    let mut left: Vec<String> = store.tokens().await.unwrap().into_iter().map(|t| t.id).collect();
    left.sort();
    assert_eq!(left, ["lasting", "of-lasting", "revoked-later", "valid"]);

    let done = |at: u64| Deed {
        at: Timestamp(at),
        token: "a".into(),
        who: "me".into(),
        action: "run.pause".into(),
        target: "r1".into(),
        detail: json!(null),
    };
    for at in [1, 2, 3] {
        store.put_audit(done(at)).await.unwrap();
    }
    assert_eq!(store.forget_deeds(Timestamp(1)).await, Ok(0));
    assert_eq!(store.forget_deeds(Timestamp(3)).await, Ok(2));
    let left = store.audit(&AuditQuery::default()).await.unwrap();
    assert_eq!(left.iter().map(|e| e.deed.at).collect::<Vec<_>>(), [Timestamp(3)]);
    assert_eq!(store.forget_deeds(Timestamp(9)).await, Ok(1));
    // Ids are not given twice: a cursor of before leads nowhere else.
    assert!(store.put_audit(done(10)).await.unwrap() > left[0].id);
}

pub async fn deeds_are_read_newest_first<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let mut ids = vec![];
    for target in ["r1", "r1/0", "r10", "r1/3", "r2"] {
        let deed = Deed {
            at: Timestamp(7),
            token: "a".into(),
            who: "me".into(),
            action: "run.pause".into(),
            target: target.into(),
            detail: json!({ "n": 1 }),
        };
        ids.push(store.put_audit(deed).await.unwrap());
    }
    assert!(ids.is_sorted());
    let targets = async |q: AuditQuery| -> Vec<String> {
        store.audit(&q).await.unwrap().into_iter().map(|e| e.deed.target).collect()
    };
    assert_eq!(targets(AuditQuery::default()).await, ["r2", "r1/3", "r10", "r1/0", "r1"]);
    let of_one = AuditQuery { target: Some("r1".into()), ..Default::default() };
    assert_eq!(targets(of_one).await, ["r1/3", "r1/0", "r1"]);
    let page = AuditQuery { before: Some(ids[4]), limit: 2, ..Default::default() };
    assert_eq!(targets(page).await, ["r1/3", "r10"]);
}
