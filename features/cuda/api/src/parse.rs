//! Reads the table of functions.

use thiserror::Error;

use crate::{Count, Extent, Function, Item, Kind, Object, Parameter, Way};

/// A line that is not one of the table's.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("functions.txt, line {line}: {what} in \"{text}\"; its head says how lines are written")]
pub struct BadLine {
    line: usize,
    what: &'static str,
    text: String,
}

/// Reads a table.
///
/// # Errors
/// At the first line that is none.
pub fn parse(text: &str) -> Result<Vec<Function>, BadLine> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(at, line)| {
            function(line).map_err(|what| BadLine { line: at + 1, what, text: line.to_owned() })
        })
        .collect()
}

fn function(line: &str) -> Result<Function, &'static str> {
    let mut words = line.split(' ');
    let since = words.next().and_then(|word| word.parse().ok()).ok_or("no version")?;
    let name = words.next().ok_or("no name")?.to_owned();
    let pairs: Vec<(&str, &str)> =
        words.map(|word| word.split_once('=').ok_or("no kind")).collect::<Result<_, _>>()?;
    let place = |name: &str| pairs.iter().position(|(known, _)| *known == name);
    let size =
        |name: &str| place(name).filter(|at| pairs[*at].1 == "size").ok_or("no parameter of kind size");
    let parameters = pairs
        .iter()
        .map(|(name, text)| {
            let kind = match text.strip_prefix("address:") {
                Some(extent) => Kind::Address(self::extent(extent, &size)?),
                None => kind(text, &place)?,
            };
            Ok(Parameter { name: (*name).to_owned(), kind })
        })
        .collect::<Result<_, &'static str>>()?;
    Ok(Function::new(since, name, parameters))
}

/// `none`, `8`, `N`, `N*4` or `WIDTH*4*ROWS@PITCH`.
fn extent(text: &str, size: &dyn Fn(&str) -> Result<usize, &'static str>) -> Result<Extent, &'static str> {
    let unit = |text: &str| text.parse().map_err(|_| "no number");
    if text == "none" {
        return Ok(Extent::None);
    }
    if let Ok(bytes) = text.parse() {
        return Ok(Extent::Bytes(bytes));
    }
    let Some((count, rest)) = text.split_once('*') else {
        return Ok(Extent::Elements { count: size(text)?, unit: 1 });
    };
    let count = size(count)?;
    let Some((elements, rest)) = rest.split_once('*') else {
        return Ok(Extent::Elements { count, unit: unit(rest)? });
    };
    let (rows, pitch) = rest.split_once('@').ok_or("no pitch")?;
    Ok(Extent::Rows { count, unit: unit(elements)?, rows: size(rows)?, pitch: size(pitch)? })
}

fn kind(text: &str, place: &dyn Fn(&str) -> Option<usize>) -> Result<Kind, &'static str> {
    match text {
        "text" => return Ok(Kind::Text),
        "out:text" => return Ok(Kind::OutText),
        "pointer" | "callback" => return Ok(Kind::Other),
        "f32" => return Ok(Kind::Float),
        "address" => return Err("an address without an extent"),
        _ => {}
    }
    let Some((way, of)) = text.split_once(':') else {
        return Ok(match item(text)? {
            Item::Handle(object) => Kind::Handle(object),
            Item::Bytes(bytes) if text.starts_with('[') => Kind::Value(bytes),
            Item::Bytes(bytes) => Kind::Number(bytes),
        });
    };
    let way = match way {
        "in" => Way::In,
        "out" => Way::Out,
        "inout" => Way::InOut,
        "drop" => return Object::named(of).map(Kind::Drop).ok_or("an unknown handle"),
        _ => return Err("an unknown way"),
    };
    let Some((of, count)) = of.split_once('*') else {
        return Ok(Kind::Pointer { way, item: item(of)?, count: Count::One });
    };
    let (name, less) = count.split_once('-').unwrap_or((count, "0"));
    let less = less.parse().map_err(|_| "no number")?;
    let count = Count::Of(place(name).ok_or("an unknown count")?, less);
    Ok(Kind::Pointer { way, item: item(of)?, count })
}

fn item(text: &str) -> Result<Item, &'static str> {
    if let Some(bytes) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return bytes.parse().map(Item::Bytes).map_err(|_| "no number");
    }
    Ok(match text {
        "u8" => Item::Bytes(1),
        "u16" => Item::Bytes(2),
        "i32" | "u32" | "f32" => Item::Bytes(4),
        "u64" | "size" | "address" => Item::Bytes(8),
        name => Item::Handle(Object::named(name).ok_or("an unknown kind")?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_lines_are_told() {
        let check = |line: &str, what: &str| {
            let error = parse(&format!("# a head\n{line}")).expect_err(line);
            assert!(error.to_string().contains(&format!("line 2: {what}")), "{error}");
        };
        check("x cuInit", "no version");
        check("2000", "no name");
        check("2000 cuInit flags", "no kind");
        check("2000 cuInit flags=i31", "an unknown kind");
        check("2000 cuInit flags=at:i32", "an unknown way");
        check("2000 cuInit flags=out:i32*n", "an unknown count");
        check("2000 cuInit at=address", "an address without an extent");
        check("2000 cuInit at=address:n", "no parameter of kind size");
        check("2000 cuInit at=address:n n=u32", "no parameter of kind size");
        check("2000 cuInit at=address:n*x n=size", "no number");
        check("2000 cuInit at=address:n*2*n n=size", "no pitch");
    }
}
