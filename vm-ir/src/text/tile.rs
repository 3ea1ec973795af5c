//! Tile kernels in text: their channels, fragments and ops.

use super::error::TextErrorKind;
use super::lexer::Token;
use super::parser::{Parser, Result};
use crate::limits::{MAX_CHANNELS, MAX_FRAGMENTS, MAX_RANK};
use crate::module::{Op, Place};
use crate::op::Shape;
use crate::tile::{Channel, Fragment, Tile};
use crate::types::Type;

impl<'t> Parser<'t> {
    /// The channels and fragments of a tile kernel of `groups`.
    pub(super) fn tile(&mut self, groups: u32) -> Result<Tile> {
        let mut tile = Tile { groups, channels: Vec::new(), fragments: Vec::new() };
        loop {
            let line = self.line();
            if self.accept_word("channel")? {
                if tile.channels.len() == MAX_CHANNELS {
                    return Err(self.too_many("channels", MAX_CHANNELS));
                }
                let name = self.global("the channel's name")?;
                self.define_place(name, Place::Channel(tile.channels.len() as u16))?;
                self.expect(':')?;
                let element = self.scalar()?;
                self.expect('[')?;
                let rows = self.integer("number of rows")?;
                self.expect(',')?;
                let columns = self.integer("number of columns")?;
                self.expect(']')?;
                self.expect_word("stages")?;
                let stages = self.integer("number of stages")?;
                let (name, dims) = (name.into(), [rows, columns]);
                let multicast = self.accept_word("multicast")?;
                tile.channels.push(Channel { name, element, dims, stages, multicast, line });
            } else if self.accept_word("fragment")? {
                if tile.fragments.len() == MAX_FRAGMENTS {
                    return Err(self.too_many("fragments", MAX_FRAGMENTS));
                }
                let name = self.global("the fragment's name")?;
                self.define_place(name, Place::Fragment(tile.fragments.len() as u16))?;
                self.expect(':')?;
                let element = self.scalar()?;
                self.expect('[')?;
                let rows = self.integer("number of rows")?;
                let columns = if self.accept(',')? { Some(self.integer("number of columns")?) } else { None };
                self.expect(']')?;
                tile.fragments.push(Fragment { name: name.into(), element, rows, columns, line });
            } else {
                return Ok(tile);
            }
        }
    }

    /// A view, an array, a channel or a fragment, by its name.
    pub(super) fn place(&mut self) -> Result<Place> {
        let Token::Global(name) = self.token else { return Err(self.expected("a name that begins with @")) };
        let Some(place) = self.places.get(name).copied() else {
            return Err(self.error(TextErrorKind::UnknownPlace(name.to_owned())));
        };
        self.advance()?;
        Ok(place)
    }

    /// An op of tile kernels.
    pub(super) fn tile_op(&mut self, op: &mut Op, depth: usize) -> Result<Vec<Type>> {
        op.place = Some(self.place()?);
        match op.code.shape() {
            Shape::Fetch | Shape::Put | Shape::PutRows | Shape::Get => {
                self.expect('[')?;
                op.operands = self.indices(MAX_RANK)?;
                self.expect(']')?;
                self.expect(',')?;
                op.others.push(self.place()?);
                if op.code.shape() == Shape::PutRows {
                    self.expect(',')?;
                    op.operands.push(self.value()?);
                }
            }
            Shape::Fill => {
                self.expect(',')?;
                let element = op.place.map_or(Type::F32, |place| self.tile_element(place));
                op.operands.push(self.operand_of(element)?);
            }
            Shape::Mma | Shape::Rows | Shape::Share | Shape::Send => {
                while self.accept(',')? {
                    self.another(op)?;
                }
            }
            Shape::Map => self.map(op, depth)?,
            _ => {}
        }
        Ok(Vec::new())
    }

    fn another(&mut self, op: &mut Op) -> Result<()> {
        if op.others.len() == MAX_FRAGMENTS {
            return Err(self.too_many("fragments of an op", MAX_FRAGMENTS));
        }
        op.others.push(self.place()?);
        Ok(())
    }

    /// `= @f, @g (%row, %column, %x, %y) { … }`, behind the first fragment that is computed.
    fn map(&mut self, op: &mut Op, depth: usize) -> Result<()> {
        while self.accept(',')? {
            self.another(op)?;
        }
        op.immediates = vec![1 + op.others.len() as u64];
        self.expect('=')?;
        let computed = op.others.len();
        if !self.at('(') {
            self.another(op)?;
            while self.accept(',')? {
                self.another(op)?;
            }
        }
        let element = |place: &Place| self.tile_element(*place);
        let elements: Vec<Type> = op.others[computed..].iter().map(element).collect();
        self.expect('(')?;
        let mut args = Vec::new();
        for ty in [Type::I32, Type::I32].into_iter().chain(elements) {
            if !args.is_empty() {
                self.expect(',')?;
            }
            let name = self.value_token("an argument")?;
            args.push(self.define(name, ty)?);
        }
        self.expect(')')?;
        self.expect('{')?;
        let computed = op.place.iter().chain(&op.others[..computed]);
        let yields: Vec<Type> = computed.map(|place| self.tile_element(*place)).collect();
        op.regions.push(self.region(depth + 1, args, &yields)?);
        Ok(())
    }

    /// The type of an element of a fragment; of anything else, which the validator refuses, some type.
    fn tile_element(&self, place: Place) -> Type {
        match place {
            Place::Fragment(i) => self.elements.get(usize::from(i)).map_or(Type::F32, |e| (*e).into()),
            _ => Type::F32,
        }
    }
}
