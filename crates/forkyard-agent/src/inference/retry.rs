//! When to try again, and how often.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use super::InferenceError;
use super::backend::{Failure, FailureKind};
use super::limiter::MAX_CLOSED;

/// A number in 0..1 that differs between callers, so that they do not come back all at once.
pub type Jitter = Arc<dyn Fn() -> f64 + Send + Sync>;

#[derive(Clone)]
pub struct RetrySettings {
    /// Of failures that may cost money each time.
    pub max_retries: u32,
    /// Of pushbacks, which cost nothing and only say that it is not yet our turn.
    pub max_pushbacks: u32,
    /// Doubled each time.
    pub first_delay: Duration,
    pub max_delay: Duration,
    pub jitter: Jitter,
}

impl Default for RetrySettings {
    fn default() -> RetrySettings {
        RetrySettings {
            max_retries: 5,
            max_pushbacks: 20,
            first_delay: Duration::from_millis(500),
            max_delay: Duration::from_secs(8),
            jitter: Arc::new(chance),
        }
    }
}

impl fmt::Debug for RetrySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetrySettings")
            .field("max_retries", &self.max_retries)
            .field("max_pushbacks", &self.max_pushbacks)
            .field("first_delay", &self.first_delay)
            .field("max_delay", &self.max_delay)
            .finish_non_exhaustive()
    }
}

/// The standard library's hasher keys are random; spreading requests in time needs no more.
fn chance() -> f64 {
    (RandomState::new().hash_one(0_u8) >> 11) as f64 / (1_u64 << 53) as f64
}

/// The tries of one turn.
#[derive(Debug, Default)]
pub struct Retries {
    failures: u32,
    pushbacks: u32,
}

#[derive(Debug, PartialEq)]
pub struct Again {
    /// For this fork.
    pub delay: Duration,
    /// For everybody, if the provider asked for it.
    pub pushback: Option<Duration>,
}

impl Retries {
    pub fn count(&self) -> u32 {
        self.failures + self.pushbacks
    }

    pub fn next(&mut self, failure: &Failure, settings: &RetrySettings) -> Result<Again, InferenceError> {
        let message = || failure.message.clone();
        let exhausted = |tries| InferenceError::Exhausted { tries, message: message() };
        let nth = match failure.kind {
            FailureKind::Rejected => {
                return Err(InferenceError::Rejected { status: failure.status, message: message() });
            }
            FailureKind::Account => return Err(InferenceError::Account { message: message() }),
            FailureKind::ContextTooLong => return Err(InferenceError::ContextTooLong { message: message() }),
            FailureKind::Transient if self.failures >= settings.max_retries => {
                return Err(exhausted(self.count() + 1));
            }
            FailureKind::Pushback if self.pushbacks >= settings.max_pushbacks => {
                return Err(exhausted(self.count() + 1));
            }
            FailureKind::Transient => {
                self.failures += 1;
                self.failures
            }
            FailureKind::Pushback => {
                self.pushbacks += 1;
                self.pushbacks
            }
        };
        let jitter = (settings.jitter)().clamp(0.0, 1.0);
        let (delay, everybody) = match failure.retry_after {
            // Waiting that long is the caller's decision.
            Some(after) if after > MAX_CLOSED => return Err(exhausted(self.count())),
            // Never earlier than asked.
            Some(after) => (after.mul_f64(1.0 + jitter / 10.0), after),
            None => {
                let step = settings.first_delay.saturating_mul(2_u32.saturating_pow(nth - 1));
                let step = step.min(settings.max_delay);
                (step.mul_f64(0.5 + jitter / 2.0), step.mul_f64(0.5))
            }
        };
        Ok(Again { delay, pushback: (failure.kind == FailureKind::Pushback).then_some(everybody) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(jitter: f64) -> RetrySettings {
        RetrySettings { jitter: Arc::new(move || jitter), ..RetrySettings::default() }
    }

    #[test]
    fn delays_double_to_their_bound_and_then_retries_end() {
        let mut retries = Retries::default();
        let failure = Failure::lost("x");
        let ms: Vec<u128> = std::iter::from_fn(|| retries.next(&failure, &settings(1.0)).ok())
            .map(|a| a.delay.as_millis())
            .collect();
        assert_eq!(ms, [500, 1000, 2000, 4000, 8000]);
        let end = retries.next(&failure, &settings(1.0)).unwrap_err();
        assert_eq!(end, InferenceError::Exhausted { tries: 6, message: "x".into() });
    }

    #[test]
    fn jitter_shortens_by_at_most_half_but_never_a_retry_after() {
        let next = |failure: &Failure, jitter| Retries::default().next(failure, &settings(jitter)).unwrap();
        assert_eq!(next(&Failure::lost("x"), 0.0).delay, Duration::from_millis(250));
        let asked = Failure {
            kind: FailureKind::Pushback,
            retry_after: Some(Duration::from_secs(7)),
            ..Failure::lost("x")
        };
        assert_eq!(next(&asked, 0.0).delay, Duration::from_secs(7));
        assert_eq!(next(&asked, 1.0).pushback, Some(Duration::from_secs(7)));
        let hours = Failure { retry_after: Some(Duration::from_secs(7200)), ..asked };
        assert!(Retries::default().next(&hours, &settings(0.0)).is_err());
    }

    #[test]
    fn what_can_never_work_is_not_tried_again() {
        for kind in [FailureKind::Rejected, FailureKind::Account, FailureKind::ContextTooLong] {
            let failure = Failure { kind, ..Failure::lost("x") };
            assert!(!Retries::default().next(&failure, &settings(0.5)).unwrap_err().is_retryable());
        }
    }

    #[test]
    fn chance_spreads() {
        let values: Vec<f64> = (0..100).map(|_| chance()).collect();
        assert!(values.iter().all(|v| (0.0..1.0).contains(v)));
        assert!(values.iter().any(|v| *v < 0.5) && values.iter().any(|v| *v > 0.5));
    }
}
