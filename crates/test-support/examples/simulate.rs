//! Runs many seeds of the simulation on all cores, or one again: `simulate --seeds N [--from S]`, `simulate --seed S`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use test_support::sim::{Report, run_seed};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).and_then(|v| v.parse::<u64>().ok())
    };
    if let Some(seed) = value("--seed") {
        let report = run_seed(seed, None);
        println!("{report:#?}");
        std::process::exit(i32::from(!report.violations.is_empty()));
    }
    let (from, seeds) = (value("--from").unwrap_or(0), value("--seeds").unwrap_or(10_000));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = AtomicU64::new(from);
    let start = Instant::now();
    let failed: Vec<Report> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                s.spawn(|| {
                    let (mut failed, mut events, mut crashes, mut virtual_ms) = (vec![], 0, 0, 0);
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= from + seeds {
                            break;
                        }
                        let report = run_seed(seed, None);
                        events += report.events;
                        crashes += report.crashes;
                        virtual_ms += report.virtual_ms;
                        if !report.violations.is_empty() {
                            failed.push(report);
                        }
                    }
                    (failed, events, crashes, virtual_ms)
                })
            })
            .collect();
        let (mut all, mut events, mut crashes, mut virtual_ms) = (vec![], 0, 0, 0);
        for w in workers {
            let (f, e, c, v) = w.join().expect("a seed panicked");
            all.extend(f);
            events += e;
            crashes += c;
            virtual_ms += v;
        }
        println!("| seeds | events | crashes | virtual days | seconds | violations |");
        println!("|---|---|---|---|---|---|");
        println!(
            "| {seeds} | {events} | {crashes} | {:.0} | {:.0} | {} |",
            virtual_ms as f64 / 86_400_000.0,
            start.elapsed().as_secs_f64(),
            all.len()
        );
        all
    });
    for r in failed.iter().take(20) {
        println!("seed {}: {}\n  {}", r.seed, r.violations.join("; "), r.reproduction());
    }
    std::process::exit(i32::from(!failed.is_empty()));
}
