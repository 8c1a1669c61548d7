//! From a link on the terminal to a cookie in the browser: a code that works once, for a short time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use axum::http::{HeaderMap, header};
use forkyard_core::{Millis, Timestamp};

use super::tokens::random_hex;

pub const COOKIE: &str = "forkyard_session";
/// How long a browser stays logged in.
pub const SESSION_DAYS: u64 = 30;
/// How long a login link works.
const CODE_LIFETIME: Millis = Millis::minutes(10);
/// Links that wait to be used.
const MAX_CODES: usize = 100;

/// Codes of this process: a link ends with it.
#[derive(Default)]
pub struct LoginCodes(Mutex<BTreeMap<String, (String, Timestamp)>>);

impl LoginCodes {
    /// A code that opens a session of this token.
    pub fn make(&self, token: &str, now: Timestamp) -> String {
        let code = random_hex(24);
        let mut codes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        codes.retain(|_, (_, until)| *until > now);
        if codes.len() >= MAX_CODES
            && let Some(oldest) = codes.iter().min_by_key(|(_, (_, until))| *until).map(|(c, _)| c.clone())
        {
            codes.remove(&oldest);
        }
        codes.insert(code.clone(), (token.to_string(), now + CODE_LIFETIME));
        code
    }

    /// The token's id, once.
    pub fn take(&self, code: &str, now: Timestamp) -> Option<String> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(code);
        taken.filter(|(_, until)| *until > now).map(|(token, _)| token)
    }
}

/// Never sent for a request that another site caused, never readable by a page's script.
pub fn session_cookie(value: &str, secure: bool, lifetime: Millis) -> String {
    let secure = if secure { "; Secure" } else { "" };
    format!("{COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure}", lifetime.0 / 1000)
}

pub(super) fn cookie(headers: &HeaderMap) -> Option<String> {
    let given = headers.get_all(header::COOKIE).iter().filter_map(|v| v.to_str().ok());
    given
        .flat_map(|line| line.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
        .map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_works_once_and_not_for_long() {
        let codes = LoginCodes::default();
        let now = Timestamp(1_000_000);
        let code = codes.make("a", now);
        assert_eq!(codes.take("other", now), None);
        assert_eq!(codes.take(&code, now), Some("a".into()));
        assert_eq!(codes.take(&code, now), None);
        let late = codes.make("a", now);
        assert_eq!(codes.take(&late, now + CODE_LIFETIME), None);
        for _ in 0..MAX_CODES + 5 {
            codes.make("a", now);
        }
        assert_eq!(codes.0.lock().unwrap().len(), MAX_CODES);
    }

    #[test]
    fn our_cookie_is_found_among_others() {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, "a=b; forkyard_session=fy_1_2; forkyard_sessionx=no".parse().unwrap());
        assert_eq!(cookie(&headers), Some("fy_1_2".into()));
        assert_eq!(cookie(&HeaderMap::new()), None);
    }
}
