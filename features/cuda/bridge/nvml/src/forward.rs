//! What the server's NVML is asked: the functions of [`FUNCTIONS`].

use vm_bridge::say;
use vm_bridge::wire::nvml::{FUNCTIONS, Parameter, Question, Value, items, number};

use crate::answers::Words;
use crate::errors::Error;
use crate::state;
use crate::sys::{caller, driver};

/// Asks for a function, whose pointers have the answer then. None where the server has no NVML.
pub(crate) fn ask(function: usize, words: &Words) -> Result<Option<u32>, Error> {
    state::facts()?;
    let mut rest = words.iter().copied();
    let mut next = || rest.next().unwrap_or_default();
    // Where what crosses is.
    let mut places = Vec::new();
    let mut values = Vec::new();
    for parameter in FUNCTIONS[function].parameters {
        let word = next();
        let len = match *parameter {
            Parameter::Device => {
                values.push(Value::Device(state::device(word)?.uuid));
                continue;
            }
            Parameter::Number(most) => {
                // What is not of 64 bits is the lower half of its word.
                let number = if most > u64::from(u32::MAX) { word as u64 } else { u64::from(word as u32) };
                if number > most {
                    return Err(Error::InvalidArgument);
                }
                values.push(Value::Number(number));
                continue;
            }
            Parameter::List(_) if word == 0 => {
                values.push(Value::Nothing);
                continue;
            }
            _ if word == 0 => return Err(Error::InvalidArgument),
            Parameter::Bytes(len) => len,
            Parameter::Version(versions) => {
                let version = caller::number(word);
                if !versions.contains(&version) {
                    return Err(Error::VersionMismatch);
                }
                (version & 0xff_ffff) as usize
            }
            Parameter::Sized(most) => {
                let len = (next() as u32 as usize).min(most);
                places.push(word);
                values.push(Value::Sized(caller::bytes(word, len)));
                continue;
            }
            Parameter::Count(most) => {
                places.push(word);
                values.push(Value::Memory(caller::number(word).min(most).to_ne_bytes().to_vec()));
                continue;
            }
            Parameter::List(len) | Parameter::Array(len) => len * items(values.last()),
        };
        places.push(word);
        values.push(Value::Memory(caller::bytes(word, len)));
    }
    let mut question = Question { function, values };
    let result = driver::ask(&mut question)?;
    if result.is_some() {
        let memories = question.values.iter().filter_map(|value| match value {
            Value::Memory(memory) | Value::Sized(memory) => Some(memory),
            _ => None,
        });
        places.iter().zip(memories).for_each(|(place, memory)| caller::write(*place, memory));
    }
    Ok(result)
}

/// Asks by a function's name: none where there is no NVML, or it is not asked for that.
pub(crate) fn by_name(name: &str, words: &Words) -> Result<Option<()>, Error> {
    let Some(function) = number(name) else { return Ok(None) };
    match ask(function, words)? {
        Some(0) => Ok(Some(())),
        Some(code) => Err(Error::Theirs(code)),
        None => {
            say::once(
                "the server has no NVML of NVIDIA's, which knows what CUDA does not: it is not supported",
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_asked_is_exported() {
        let names: Vec<&str> = include_str!("../names.txt").lines().collect();
        for function in FUNCTIONS {
            assert!(names.contains(&function.name), "{}", function.name);
        }
    }
}
