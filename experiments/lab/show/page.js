const tip=document.getElementById('tip'),known=new WeakMap(),NEAR=14;
function show(){const all=[...document.querySelectorAll('section')];
 const wanted=all.find(s=>s.id===decodeURIComponent(location.hash.slice(1)))||all[0];
 all.forEach(s=>s.classList.toggle('on',s===wanted));scrollTo(0,0)}
function marks(svg){if(!known.has(svg)){const found=[];
 for(const g of svg.querySelectorAll('[data-tip]')){const told=g.dataset.tip.split('NEXT');// html.py says which mark that is
  let own=[...g.querySelectorAll('use')];
  if(!own.length)own=[...g.querySelectorAll('path')].filter(p=>!p.closest('defs'));
  own.forEach((m,i)=>told[i]&&found.push([m,told[i]]))}
 known.set(svg,found)}return known.get(svg)}
addEventListener('pointermove',e=>{const svg=e.target.closest&&e.target.closest('svg');let best=null,least=NEAR;
 if(svg)for(const [m,text] of marks(svg)){const r=m.getBoundingClientRect();
  const away=Math.hypot(Math.max(r.left-e.clientX,0,e.clientX-r.right),Math.max(r.top-e.clientY,0,e.clientY-r.bottom));
  if(away<least){least=away;best=text}}
 tip.hidden=!best;if(best){tip.textContent=best;
  tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=e.clientY+16+'px'}});
addEventListener('hashchange',show);document.documentElement.classList.add('js');show();
