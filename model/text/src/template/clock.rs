//! `strftime_now` of chat templates, in UTC.
//!
//! Templates put the date into a system prompt. UTC makes a prompt independent of where the program runs.
use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The current time in the given format; `Err` is a directive that is not known.
pub(super) fn now(format: &str) -> Result<String, char> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    formatted(format, seconds)
}

fn formatted(format: &str, seconds: u64) -> Result<String, char> {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let directive = chars.next().unwrap_or('%');
        text += &match directive {
            'Y' => format!("{year}"),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'j' => format!("{:03}", days - days_before(year) + 1),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => return Err(other),
        };
    }
    Ok(text)
}

/// Year, month and day of a day counted from 1970-01-01, by the Gregorian rules.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut rest = days - days_before(year);
    let lengths = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if rest < length {
            return (year, month, rest + 1);
        }
        rest -= length;
    }
    (year, 12, 31)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let leaps = |y: u64| y / 4 - y / 100 + y / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let all = "%Y-%m-%d %H:%M:%S %a %b %j %I%p %%";
        assert_eq!(formatted(all, 0), Ok("1970-01-01 00:00:00 Thu Jan 001 12AM %".into()));
        assert_eq!(formatted(all, 951_825_600), Ok("2000-02-29 12:00:00 Tue Feb 060 12PM %".into()));
        assert_eq!(formatted(all, 1_735_689_599), Ok("2024-12-31 23:59:59 Tue Dec 366 11PM %".into()));
        assert_eq!(formatted("%d %B %Y, %A", 4_102_444_800), Ok("01 January 2100, Friday".into()));
        assert_eq!(formatted("%q", 0), Err('q'));
    }
}
