//! Numbers for people: bytes, times, and where an axis has its ticks.

use std::time::Duration;

use vm_hook::options;

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Bytes of the command line, as in `24G`.
pub(crate) fn parsed(text: &str) -> Result<u64, String> {
    options::bytes(text).ok_or_else(|| "it is a number of bytes, with K, M, G or T behind it or not".into())
}

/// Bytes, as in `1.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut number, mut unit) = (bytes as f64 / 1024.0, 0);
    // What would be shown as 1024 is 1 of the next unit.
    while number >= 1023.95 && unit + 1 < UNITS.len() {
        number /= 1024.0;
        unit += 1;
    }
    let digits = if number >= 100.0 { 0 } else { 1 };
    let text = format!("{number:.digits$}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// A time, as in `1.25 ms`.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let (number, unit) = match seconds {
        0.0..1e-6 => (seconds * 1e9, "ns"),
        1e-6..1e-3 => (seconds * 1e6, "µs"),
        1e-3..1.0 => (seconds * 1e3, "ms"),
        1.0..600.0 => (seconds, "s"),
        600.0..36_000.0 => (seconds / 60.0, "min"),
        _ => (seconds / 3600.0, "h"),
    };
    let digits = match number {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    let text = format!("{number:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

/// The steps of an axis of times: about so many up to a last one, in microseconds.
pub(crate) fn time_step(last: u64, about: u64) -> u64 {
    let least = (last / about.max(1)).max(1);
    let (second, minute) = (1_000_000, 60_000_000);
    let decimal = |step: u64| [1, 2, 5].map(|times| step * times);
    let short = (0..7).flat_map(|power| decimal(10u64.pow(power)));
    let long = [10, 20, 30].map(|times| second * times);
    let longer = [1, 2, 5, 10, 20, 30, 60, 120, 360, 720, 1440].map(|times| minute * times);
    let step = short.chain(long).chain(longer).find(|step| *step >= least);
    step.unwrap_or_else(|| least.next_multiple_of(1440 * minute))
}

/// The steps of an axis of bytes: about so many up to a last one.
pub(crate) fn byte_step(last: u64, about: u64) -> u64 {
    let least = (last / about.max(1)).max(1);
    least.checked_next_power_of_two().unwrap_or(1 << 63)
}

/// A text of somebody else's, without what a terminal or a picture would obey, and so long at most: its end is kept.
pub(crate) fn printable(text: &str, longest: usize) -> String {
    let count = text.chars().count();
    let left_out = count.saturating_sub(longest);
    let kept = text
        .chars()
        .skip(left_out)
        .map(|c| if c.is_control() || c == '\u{fffe}' || c == '\u{ffff}' { '?' } else { c });
    if left_out == 0 { kept.collect() } else { std::iter::once('…').chain(kept.skip(1)).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let check = |number: u64, text: &str| assert_eq!(bytes(number), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1 << 20, "1 MiB");
        check((1 << 20) - 1, "1 MiB");
        check(3 << 29, "1.5 GiB");
        check(u64::MAX, "16 EiB");
        let check = |nanoseconds: u64, text: &str| assert_eq!(time(Duration::from_nanos(nanoseconds)), text);
        check(0, "0 ns");
        check(1_500, "1.5 µs");
        check(100_000_000, "100 ms");
        check(90_000_000_000, "90 s");
        check(u64::MAX, "5124096 h");
        let check = |last: u64, step: u64| assert_eq!(time_step(last, 5), step);
        check(0, 1);
        check(1_000, 200);
        check(1_100_000, 500_000);
        check(600_000_000, 120_000_000);
        assert!(u64::MAX / time_step(u64::MAX, 5) <= 5 && u64::MAX / byte_step(u64::MAX, 5) <= 5);
        assert_eq!((printable("a\n\u{1b}b", 9), printable("abcdef", 3)), ("a??b".into(), "…ef".into()));
    }
}
