// The Vercel AI SDK against a server, whose address is the argument. Run by test_foreign_clients.py.

import assert from 'node:assert';
import { generateObject, generateText, streamText, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';

const at = { baseURL: `${process.argv[2]}/v1`, apiKey: 'none' };
const compatible = createOpenAICompatible({ name: 'mini-infer', supportsStructuredOutputs: true, ...at });
const openai = createOpenAI(at);
const weather = tool({
  description: 'Of a city',
  inputSchema: z.object({ city: z.enum(['Paris', 'Oslo']) }),
  execute: async ({ city }) => `rain in ${city}`,
});

for (const model of [compatible('mini-infer'), openai.chat('mini-infer'), openai('mini-infer')]) {
  const ask = { model, prompt: 'How is the weather?', tools: { weather }, maxRetries: 0 };

  const whole = await generateText({ ...ask, toolChoice: 'required' });
  assert.equal(whole.finishReason, 'tool-calls');
  assert.match(whole.toolResults[0].output, /^rain in (Paris|Oslo)$/);

  const stream = streamText({ ...ask, toolChoice: { type: 'tool', toolName: 'weather' } });
  const kinds = new Set();
  for await (const part of stream.fullStream) kinds.add(part.type);
  assert(kinds.has('tool-input-delta') && kinds.has('tool-result') && !kinds.has('error'));

  const { object } = await generateObject({ model, prompt: 'hi', schema: z.object({ size: z.enum(['a', 'b']) }) });
  assert(['a', 'b'].includes(object.size));
}
