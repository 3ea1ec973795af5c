//! The pipeline of the pattern.

use std::io::Cursor;
use std::sync::Arc;

use ash::vk;
use vm_accel::{Error, Result};

use super::{Device, failed};

/// A pipeline that draws one triangle, with a number for its fragments.
pub(crate) struct Pipeline {
    pub(super) handle: vk::Pipeline,
    pub(super) layout: vk::PipelineLayout,
    device: Arc<Device>,
}

/// A shader, until the pipeline is made.
struct Module<'a>(vk::ShaderModule, &'a Device);

impl<'a> Module<'a> {
    fn new(device: &'a Device, code: &[u8]) -> Result<Self> {
        let words = ash::util::read_spv(&mut Cursor::new(code));
        let words =
            words.map_err(|error| Error::Host { what: "reading a shader", cause: error.to_string() })?;
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: the code is a valid module, and part of this program.
        let module = unsafe { device.handle.create_shader_module(&info, None) };
        Ok(Self(module.map_err(failed("vkCreateShaderModule"))?, device))
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        // SAFETY: nobody uses it after this.
        unsafe { self.1.handle.destroy_shader_module(self.0, None) };
    }
}

impl Pipeline {
    pub(crate) fn new(
        device: &Arc<Device>,
        format: vk::Format,
        vertex: &[u8],
        fragment: &[u8],
    ) -> Result<Self> {
        let (vertex, fragment) = (Module::new(device, vertex)?, Module::new(device, fragment)?);
        let constants =
            [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::FRAGMENT).size(4)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&constants);
        // SAFETY: what the structure names are locals.
        let layout = unsafe { device.handle.create_pipeline_layout(&info, None) };
        let layout = layout.map_err(failed("vkCreatePipelineLayout"))?;
        let mut this = Self { handle: vk::Pipeline::null(), layout, device: Arc::clone(device) };
        let stage = |module: &Module<'_>, stage| {
            vk::PipelineShaderStageCreateInfo::default().module(module.0).name(c"main").stage(stage)
        };
        let stages =
            [stage(&vertex, vk::ShaderStageFlags::VERTEX), stage(&fragment, vk::ShaderStageFlags::FRAGMENT)];
        let input = vk::PipelineVertexInputStateCreateInfo::default();
        let assembly = vk::PipelineInputAssemblyStateCreateInfo::default()
            .topology(vk::PrimitiveTopology::TRIANGLE_LIST);
        let viewport = vk::PipelineViewportStateCreateInfo::default().viewport_count(1).scissor_count(1);
        let raster = vk::PipelineRasterizationStateCreateInfo::default().line_width(1.0);
        let samples = vk::PipelineMultisampleStateCreateInfo::default()
            .rasterization_samples(vk::SampleCountFlags::TYPE_1);
        let colors =
            [vk::PipelineColorBlendAttachmentState::default()
                .color_write_mask(vk::ColorComponentFlags::RGBA)];
        let blend = vk::PipelineColorBlendStateCreateInfo::default().attachments(&colors);
        let changing = [vk::DynamicState::VIEWPORT, vk::DynamicState::SCISSOR];
        let dynamic = vk::PipelineDynamicStateCreateInfo::default().dynamic_states(&changing);
        let formats = [format];
        let mut rendering = vk::PipelineRenderingCreateInfo::default().color_attachment_formats(&formats);
        let info = vk::GraphicsPipelineCreateInfo::default()
            .stages(&stages)
            .vertex_input_state(&input)
            .input_assembly_state(&assembly)
            .viewport_state(&viewport)
            .rasterization_state(&raster)
            .multisample_state(&samples)
            .color_blend_state(&blend)
            .dynamic_state(&dynamic)
            .layout(layout)
            .push_next(&mut rendering);
        let (cache, info) = (vk::PipelineCache::null(), [info]);
        // SAFETY: what the structure names are locals, and live.
        let made = unsafe { device.handle.create_graphics_pipelines(cache, &info, None) };
        let made = made.map_err(|(_, error)| failed("vkCreateGraphicsPipelines")(error))?;
        this.handle = made.first().copied().unwrap_or_default();
        Ok(this)
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // SAFETY: what was recorded with it holds it, and has run.
        unsafe { self.device.handle.destroy_pipeline(self.handle, None) };
        // SAFETY: as above.
        unsafe { self.device.handle.destroy_pipeline_layout(self.layout, None) };
    }
}
