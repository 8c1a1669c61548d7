//! Sessions of browsers.

use axum::body::Body;
use axum::http::Request;
use forkyard_core::Millis;
use forkyard_engine::clock::Clock;
use forkyard_server::access::{SESSION_DAYS, make_token};
use forkyard_store::{Access, Scope, Token};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use crate::world::World;

/// Logs in with a token of this lifetime: the token, the session, and how many seconds the cookie is kept.
async fn logged_in(w: &World, lifetime: Option<Millis>) -> (Token, Token, u64) {
    let now = Clock::system().now();
    let token = make_token(&*w.store, now, "mine", Scope::Read, lifetime).await.unwrap().token;
    let link = Request::get(w.app.login_link("", &token.id)).header("host", "localhost");
    let router = TowerToHyperService::new(w.app.router());
    let answer = router.call(link.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(answer.status().as_u16(), 303);
    let cookie = answer.headers()["set-cookie"].to_str().unwrap();
    let age = cookie.split("; ").find_map(|part| part.strip_prefix("Max-Age=")).unwrap().parse().unwrap();
    let sessions = w.store.tokens().await.unwrap();
    let session = sessions.into_iter().find(|t| t.parent.as_ref() == Some(&token.id)).unwrap();
    (token, session, age)
}

#[tokio::test]
async fn a_session_does_not_outlive_its_token() {
    let w = World::new().await;
    let days = SESSION_DAYS * 24 * 3600;
    let (token, session, age) = logged_in(&w, Some(Millis::secs(3600))).await;
    assert_eq!(session.expires_at, token.expires_at);
    assert!(age <= 3600, "{age}");
    for lifetime in [None, Some(Millis::secs(2 * days))] {
        let (_, session, age) = logged_in(&w, lifetime).await;
        assert_eq!(session.expires_at, Some(session.created_at + Millis::secs(days)));
        assert_eq!(age, days);
    }
}
